// The parameter space, declared once: parsing, printing, validation, enumeration, help and docs are
// all derived from kAxes below.
#include "schedule/axes.h"

#include <algorithm>
#include <charconv>

#include "base/check.h"

namespace uniep {
namespace {

/// Type-erased access to one field of Schedule as an int.
template <auto Field>
struct Access {
  using Value = std::remove_reference_t<decltype(std::declval<Schedule&>().*Field)>;
  static int get(const Schedule& s) { return static_cast<int>(s.*Field); }
  static void set(Schedule& s, int v) { s.*Field = static_cast<Value>(v); }
};

template <auto Field>
void set_defaults(AxisInfo& info) {
  info.default_value = Access<Field>::get(default_schedule(Backend::kCpu));
  info.cuda_default = Access<Field>::get(default_schedule(Backend::kCuda));
}

template <auto Field>
Axis named(std::string_view name, std::vector<std::string_view> choices, AxisScope scope,
           std::string_view meaning) {
  AxisInfo info{.name = name, .meaning = meaning, .choices = std::move(choices), .scope = scope};
  info.max = static_cast<int>(info.choices.size()) - 1;
  set_defaults<Field>(info);
  for (int v = 0; v <= info.max; ++v) info.candidates.push_back(v);
  return {std::move(info), Access<Field>::get, Access<Field>::set};
}

template <auto Field>
Axis number(std::string_view name, int min, int max, std::vector<int> candidates, AxisScope scope,
            std::string_view meaning) {
  AxisInfo info{.name = name, .meaning = meaning, .min = min, .max = max, .scope = scope};
  set_defaults<Field>(info);
  info.candidates = std::move(candidates);
  return {std::move(info), Access<Field>::get, Access<Field>::set};
}

template <auto Field>
Axis power_of_two(std::string_view name, int min, int max, AxisScope scope,
                  std::string_view meaning) {
  std::vector<int> candidates;
  for (int v = min; v <= max; v *= 2) candidates.push_back(v);
  Axis axis = number<Field>(name, min, max, std::move(candidates), scope, meaning);
  axis.info.power_of_two = true;
  return axis;
}

constexpr AxisScope kLaunch = AxisScope::kLaunch;
constexpr AxisScope kCompileTime = AxisScope::kCompileTime;

const std::vector<Axis>& make_axes() {
  static const std::vector<Axis> kAxes = {
      named<&Schedule::launch>(
          "launch", {"separate", "pipelined", "paired", "single"}, kLaunch,
          "which stages share a launch: none; communication of a wave with computation of the wave "
          "before; dispatch+fc1 and fc2+reduce; all of them"),
      number<&Schedule::waves>("waves", 1, 16, {1, 2, 4, 8}, kLaunch,
                               "parts into which each expert's tiles are split; queues are wave by "
                               "wave"),
      number<&Schedule::workers>("workers", 0, 1024, {0}, kLaunch,
                                 "workers per rank (CPU threads, GPU CTAs); 0: as many as fit"),
      number<&Schedule::dispatch_workers>("dispatch_workers", 0, 1024, {0, 1, 2, 3}, kLaunch,
                                          "workers that begin with dispatch where it shares a "
                                          "launch; 0: dispatch tasks stand in the "
                                          "main queue, just ahead of the tiles that need them"),
      named<&Schedule::dispatch_join>("dispatch_join", {"no", "yes"}, kLaunch,
                                      "dispatch workers take other tasks when dispatch is done"),
      number<&Schedule::pull_tokens>("pull_tokens", 1, 4096, {4, 16, 64, 256}, kLaunch,
                                     "token copies that one dispatch task pulls"),
      named<&Schedule::dispatch_wire>(
          "dispatch_wire", {"dedup", "rows"}, kLaunch,
          "pull each (source, token) once for all its rows here, or once per row"),
      power_of_two<&Schedule::tile_m>("tile_m", 16, 128, kCompileTime, "rows of a GEMM tile"),
      power_of_two<&Schedule::tile_n>("tile_n", 64, 256, kCompileTime,
                                      "columns of a GEMM tile (fc1: half gate, half up)"),
      named<&Schedule::expert_order>("expert_order", {"index", "heavy-first", "light-first"},
                                     kLaunch,
                                     "order of a rank's experts: as numbered, or by their rows"),
      named<&Schedule::rotate>(
          "rotate", {"none", "own-first", "next-first"}, kLaunch,
          "source rank whose rows an expert's tiles begin with: rank 0, this rank, the next rank"),
      named<&Schedule::raster>("raster", {"along-m", "along-n"}, kLaunch,
                               "direction in which the tiles of one expert are walked"),
      number<&Schedule::lag>("lag", 0, 4096, {0, 1, 2, 4, 4096}, kLaunch,
                             "experts by which fc2 follows fc1 where both share a launch"),
      power_of_two<&Schedule::ready_rows>(
          "ready_rows", 16, 128, kLaunch,
          "dispatched rows per readiness counter; at most a tile's rows, tile_m, are used"),
      power_of_two<&Schedule::token_block>("token_block", 1, 256, kLaunch,
                                           "tokens per arrival counter and reduce task"),
      number<&Schedule::push_depth>("push_depth", 0, 256, {0, 1, 2, 8, 64}, kLaunch,
                                    "tiles of a worker whose pushes may be under way while it "
                                    "computes on; 0: each push is awaited"),
      named<&Schedule::wgrad>(
          "wgrad", {"separate", "after", "interleaved"}, kLaunch,
          "weight gradients: launches of their own; ahead of reduce in the last launch; as filler "
          "behind each expert's dfc1"),
  };
  return kAxes;
}

std::string range_text(const AxisInfo& a) {
  std::string text;
  if (!a.choices.empty()) {
    for (const auto& c : a.choices) text += cat(text.empty() ? "" : ", ", c);
    return text;
  }
  return cat(a.min, " to ", a.max, a.power_of_two ? ", a power of two," : "");
}

}  // namespace

std::span<const Axis> axes() { return make_axes(); }

std::span<const AxisInfo> schedule_axes() {
  static const std::vector<AxisInfo> kInfos = [] {
    std::vector<AxisInfo> infos;
    for (const Axis& a : axes()) infos.push_back(a.info);
    return infos;
  }();
  return kInfos;
}

int axis_value(const Schedule& schedule, std::size_t axis) { return axes()[axis].get(schedule); }

void set_axis(Schedule& schedule, std::size_t axis, int value) {
  const Axis& a = axes()[axis];
  const bool accepted = value >= a.info.min && value <= a.info.max &&
                        (!a.info.power_of_two || (value & (value - 1)) == 0);
  require(accepted, ErrorCode::kInvalidArgument, "schedule axis ", a.info.name, " is ", value, "; ",
          range_text(a.info), " is accepted");
  a.set(schedule, value);
}

int parse_axis_value(const AxisInfo& axis, std::string_view text) {
  const auto choice = std::find(axis.choices.begin(), axis.choices.end(), text);
  if (choice != axis.choices.end()) return static_cast<int>(choice - axis.choices.begin());
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(axis.choices.empty() && error == std::errc{} && end == text.data() + text.size(),
          ErrorCode::kInvalidArgument, "schedule axis ", axis.name, " is '", text, "'; ",
          range_text(axis), " is accepted");
  return value;
}

std::string axis_value_text(const AxisInfo& axis, int value) {
  // A value that is no choice is printed too: schedules are printed before they are validated.
  const bool is_choice = value >= 0 && value < static_cast<int>(axis.choices.size());
  return is_choice ? std::string(axis.choices[static_cast<std::size_t>(value)])
                   : std::to_string(value);
}

}  // namespace uniep
