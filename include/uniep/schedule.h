#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "uniep/backend.h"
#include "uniep/macros.h"
#include "uniep/problem.h"

namespace uniep {

enum class LaunchGrouping : int { kSeparate, kPipelined, kPaired, kSingle, kWaves };
enum class ExpertOrder : int { kIndex, kHeavyFirst, kLightFirst };
enum class SourceRotation : int { kNone, kOwnFirst, kNextFirst };
enum class Raster : int { kAlongM, kAlongN };
enum class DispatchWire : int { kDedup, kRows };
enum class WgradPlacement : int { kSeparate, kAfter, kInterleaved };

/// One point of the parameter space: decides how the stages of a pass share launches, which workers
/// do what, in which order tiles are taken, and at what granularity readiness is signalled. It
/// never decides a result: no axis below changes a bit. `schedule_axes()` describes each field
/// (meaning, range, defaults); docs/schedule.md is the reference. `Schedule{}` is the default of
/// the CPU backend.
///
/// A trivially copyable value: kernels take it as an argument.
struct Schedule {
  LaunchGrouping launch = LaunchGrouping::kSingle;
  int waves = 1;
  int workers = 0;
  int dispatch_workers = 3;
  bool dispatch_join = true;
  int pull_tokens = 64;
  DispatchWire dispatch_wire = DispatchWire::kDedup;
  int tile_m = 64;
  int tile_n = 128;
  ExpertOrder expert_order = ExpertOrder::kIndex;
  SourceRotation rotate = SourceRotation::kOwnFirst;
  Raster raster = Raster::kAlongM;
  int band = 0;
  int lag = 1;
  int lag_tiles = 0;
  int head_start = 0;
  int mix_run = 0;
  int ready_rows = 64;
  int token_block = 32;
  int push_depth = 64;
  WgradPlacement wgrad = WgradPlacement::kInterleaved;
  int wgrad_run = 1;

  friend bool operator==(const Schedule&, const Schedule&) = default;
};

/// What a layer of this backend uses where nothing better is known (`Layer::schedule`). In every
/// backend it is preset "single"; granularity and numbers of workers differ.
UNIEP_API Schedule default_schedule(Backend backend);

/// When a value takes effect: chosen when code is compiled (a kernel variant), or at each launch.
enum class AxisScope { kCompileTime, kLaunch };

/// One axis of the parameter space, as `schedule_axes()` lists them. Values are integers; where
/// `choices` is not empty a value is an index into it and prints as that name.
struct AxisInfo {
  std::string_view name;
  std::string_view meaning;
  std::vector<std::string_view> choices{};
  int min = 0;
  int max = 0;
  bool power_of_two = false;
  int default_value = 0;  ///< of the CPU backend
  int cuda_default = 0;   ///< of the CUDA backend
  /// What tuned schedules have that were stored before the axis existed, on the CPU. Never changes.
  int neutral_value = 0;
  int cuda_neutral = 0;  ///< the same on the CUDA backend
  AxisScope scope = AxisScope::kLaunch;
  std::vector<int> candidates{};       ///< values worth trying on the CPU, by samplers and tuner
  std::vector<int> cuda_candidates{};  ///< the same for the CUDA backend
  /// The cases in which the value changes anything; empty: all.
  std::string_view effect{};
};

/// Every axis, in the order in which a schedule prints.
UNIEP_API std::span<const AxisInfo> schedule_axes();

/// Value of axis number `axis`, an index into `schedule_axes()`; throws Error(kInvalidArgument)
/// where there is no such axis.
UNIEP_API int axis_value(const Schedule& schedule, std::size_t axis);

/// Sets it; throws Error(kInvalidArgument) for values out of the axis's range, too.
UNIEP_API void set_axis(Schedule& schedule, std::size_t axis, int value);

/// Something that a schedule must keep to besides the ranges of its axes, and why.
struct ConstraintInfo {
  std::string_view rule;
  std::string_view reason;
  std::optional<Backend> backend{};  ///< that has it; nothing: all
};
UNIEP_API std::span<const ConstraintInfo> schedule_constraints();

/// A named point: "sequential", "pipelined:n" (n waves, 2 to 16), "two-kernel" or "single".
struct PresetInfo {
  std::string_view name;
  std::string_view meaning;
  std::string_view sets;  ///< "key=value,...": the axes that make it what it is, and no others
};
UNIEP_API std::span<const PresetInfo> schedule_presets();

/// Reads "PRESET", "key=value,..." or "PRESET,key=value,...". Axes that the text leaves alone are
/// those of `base`: for a GPU, give `default_schedule(Backend::kCuda)`. Throws
/// Error(kInvalidArgument) naming the word it does not know and what it accepts.
UNIEP_API Schedule parse_schedule(std::string_view text, const Schedule& base = {});

/// "launch=single,waves=1,...": every axis; `parse_schedule` gives the same schedule back.
UNIEP_API std::string to_string(const Schedule& schedule);

/// Why this schedule cannot run this problem, which is valid, or nothing where it can.
UNIEP_API std::optional<std::string> invalid_reason(const Schedule& schedule,
                                                    const Problem& problem);

/// Throws Error(kInvalidArgument) with `invalid_reason`.
UNIEP_API void validate(const Schedule& schedule, const Problem& problem);

}  // namespace uniep
