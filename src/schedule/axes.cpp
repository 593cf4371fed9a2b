// The parameter space, declared once: parsing, printing, validation, enumeration, help and docs are
// all derived from kAxes below.
#include "schedule/axes.h"

#include <algorithm>
#include <charconv>

#include "base/check.h"
#include "base/nearest.h"
#include "base/quotes.h"
#include "graph/extents.h"

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

/// What entries of tuned schedules mean that do not name the axis, since they are older than it:
/// the value under which a pass runs as it did before. Never changes, unlike a default. Those of
/// the first axes, which every entry names, are preset sequential's.
struct Neutral {
  template <class T>
  explicit Neutral(T everywhere) : Neutral(everywhere, everywhere) {}
  template <class T>
  Neutral(T on_cpu, T on_cuda) : cpu(static_cast<int>(on_cpu)), cuda(static_cast<int>(on_cuda)) {}

  int cpu;
  int cuda;
};

/// Values worth trying; `cuda` empty: those of the CPU.
struct Candidates {
  std::vector<int> cpu;
  std::vector<int> cuda{};
};

/// Where an axis matters, in words and as code.
struct Effect {
  std::string_view text{};
  Matters matters = nullptr;
};

template <auto Field>
Axis make(AxisInfo info, Neutral neutral, Candidates candidates, const Effect& effect) {
  set_defaults<Field>(info);
  info.neutral_value = neutral.cpu;
  info.cuda_neutral = neutral.cuda;
  info.cuda_candidates = candidates.cuda.empty() ? candidates.cpu : std::move(candidates.cuda);
  info.candidates = std::move(candidates.cpu);
  info.effect = effect.text;
  return {std::move(info), Access<Field>::get, Access<Field>::set, effect.matters};
}

template <auto Field>
Axis named(std::string_view name, std::vector<std::string_view> choices, Neutral neutral,
           std::string_view meaning, const Effect& effect = {}) {
  AxisInfo info{.name = name, .meaning = meaning, .choices = std::move(choices)};
  info.max = static_cast<int>(info.choices.size()) - 1;
  Candidates all;
  for (int v = 0; v <= info.max; ++v) all.cpu.push_back(v);
  return make<Field>(std::move(info), neutral, std::move(all), effect);
}

struct Range {
  int min, max;
};

template <auto Field>
Axis number(std::string_view name, Range range, Neutral neutral, Candidates candidates,
            std::string_view meaning, const Effect& effect = {}) {
  AxisInfo info{.name = name, .meaning = meaning, .min = range.min, .max = range.max};
  return make<Field>(std::move(info), neutral, std::move(candidates), effect);
}

template <auto Field>
Axis power_of_two(std::string_view name, Range range, Neutral neutral, Candidates candidates,
                  std::string_view meaning) {
  Axis axis = number<Field>(name, range, neutral, std::move(candidates), meaning);
  axis.info.power_of_two = true;
  return axis;
}

Axis compile_time(Axis axis) {
  axis.info.scope = AxisScope::kCompileTime;
  return axis;
}

// Where axes matter.

constexpr Effect kWithDispatchers{
    "where dispatch shares a launch; on the CPU also with workers=0, whose number it adds to",
    [](const Schedule& s, Pass, Backend backend) {
      return s.launch != LaunchGrouping::kSeparate || (backend == Backend::kCpu && s.workers == 0);
    }};
constexpr Effect kWhereDispatchersJoin{"where dispatch shares a launch and has workers of its own",
                                       [](const Schedule& s, Pass, Backend) {
                                         return s.launch != LaunchGrouping::kSeparate &&
                                                s.dispatch_workers > 0;
                                       }};
constexpr Effect kWhereGemmsMeet{
    "where both products share a launch", [](const Schedule& s, Pass, Backend) {
      return s.launch != LaunchGrouping::kSeparate && s.launch != LaunchGrouping::kPaired;
    }};
constexpr Effect kOnTheCpu{"on the CPU, over an emulated link",
                           [](const Schedule&, Pass, Backend b) { return b == Backend::kCpu; }};
constexpr Effect kInBackward{"in the backward pass", [](const Schedule&, Pass pass, Backend) {
                               return pass == Pass::kBackward;
                             }};

const std::vector<Axis>& make_axes() {
  static const std::vector<Axis> kAxes = {
      named<&Schedule::launch>(
          "launch", {"separate", "pipelined", "paired", "single", "waves"},
          Neutral(LaunchGrouping::kSeparate),
          "which stages share a launch: none; communication of a wave with computation of the wave "
          "before; dispatch+fc1 and fc2+reduce; all of them; all of a wave"),
      number<&Schedule::waves>("waves", {1, kMostWaves}, Neutral(1), {{1, 2, 4, 8}, {1, 2, 4}},
                               "parts into which each expert's tiles are split; queues are wave by "
                               "wave"),
      number<&Schedule::workers>("workers", {0, 1024}, Neutral(0), {{0, 1, 2, 3, 4}, {0}},
                                 "workers per rank (CPU threads, GPU CTAs); 0: as many as fit"),
      number<&Schedule::dispatch_workers>(
          "dispatch_workers", {0, 1024}, Neutral(1), {{0, 1, 2, 3}, {4, 8, 12, 16, 24, 32, 64}},
          "workers that begin with dispatch where it shares a launch, n times as many on a rank "
          "with n times the rows of an even routing; 0: dispatch tasks stand in the main queue, "
          "just ahead of the tiles that need them",
          kWithDispatchers),
      named<&Schedule::dispatch_join>("dispatch_join", {"no", "yes"}, Neutral(true),
                                      "dispatch workers take other tasks when dispatch is done",
                                      kWhereDispatchersJoin),
      number<&Schedule::pull_tokens>("pull_tokens", {0, 4096}, Neutral(0),
                                     {{0, 4, 16, 64, 256}, {0, 1, 2, 4, 8, 16, 32, 64}},
                                     "token copies that one dispatch task pulls; 0: 8, or fewer "
                                     "where ranks have 4096 tokens or fewer; at most 2 where "
                                     "dispatch has a launch of its own"),
      named<&Schedule::dispatch_wire>(
          "dispatch_wire", {"dedup", "rows"}, Neutral(DispatchWire::kDedup),
          "pull each (source, token) once for all its rows here, or once per row"),
      compile_time(power_of_two<&Schedule::tile_m>("tile_m", {16, 128}, Neutral(64, 128),
                                                   {{16, 32, 64, 128}, {128}},
                                                   "rows of a GEMM tile")),
      compile_time(power_of_two<&Schedule::tile_n>(
          "tile_n", {64, 256}, Neutral(128), {{64, 128, 256}, {128, 256}},
          "columns of a GEMM tile (fc1: half gate, half up)")),
      named<&Schedule::expert_order>("expert_order", {"index", "heavy-first", "light-first"},
                                     Neutral(ExpertOrder::kIndex),
                                     "order of a rank's experts: as numbered, or by their rows"),
      named<&Schedule::rotate>(
          "rotate", {"none", "own-first", "next-first"}, Neutral(SourceRotation::kNone),
          "source rank whose rows an expert's tiles begin with: rank 0, this rank, the next rank"),
      named<&Schedule::raster>("raster", {"along-m", "along-n"}, Neutral(Raster::kAlongM),
                               "direction in which the tiles of one expert are walked"),
      number<&Schedule::band>("band", {0, 4096}, Neutral(0), {{0, 2, 8}, {0, 4, 8, 16, 32}},
                              "tiles in that direction before the walk turns to the next row or "
                              "column of tiles, where an expert has at least three times as many; "
                              "0: all"),
      number<&Schedule::lag>(
          "lag", {0, 4096}, Neutral(0), {{0, 1, 2, 4, 4096}, {0, 1, 2, 4, 8, 4096}},
          "experts by which fc2 follows fc1 where both share a launch, at least", kWhereGemmsMeet),
      number<&Schedule::lag_tiles>("lag_tiles", {0, 65536}, Neutral(0),
                                   {{0, 16, 64}, {0, 256, 512, 1024, 2048}},
                                   "likewise, as many experts as have this many tiles of fc1",
                                   kWhereGemmsMeet),
      number<&Schedule::head_start>("head_start", {0, 100}, Neutral(0), {{0, 50}, {0, 20, 40, 60}},
                                    "percent of fc1's experts ahead of the first fc2, which then "
                                    "catches up evenly to the lag; 0: the lag throughout",
                                    kWhereGemmsMeet),
      number<&Schedule::mix_run>(
          "mix_run", {0, 1024}, Neutral(0), {{0, 4}, {0, 4, 16}},
          "tiles of fc1 in a row, dealt out evenly among those of the fc2 that follows by the lag; "
          "0, or where both have more than 1024 tiles together: all of an expert's fc1, then fc2",
          kWhereGemmsMeet),
      power_of_two<&Schedule::ready_rows>(
          "ready_rows", {16, 128}, Neutral(128), {{16, 32, 64, 128}, {32, 64, 128}},
          "dispatched rows per readiness counter; at most a tile's rows, tile_m, are used"),
      power_of_two<&Schedule::token_block>(
          "token_block", {0, 256}, Neutral(0),
          {{0, 1, 2, 4, 8, 16, 32, 64, 128, 256}, {0, 1, 2, 4, 8, 16, 32, 64, 128}},
          "tokens per arrival counter and reduce task, tokens or rows per task between hosts; "
          "0: 32, or fewer where ranks have 2048 tokens or fewer"),
      number<&Schedule::push_depth>("push_depth", {0, 256}, Neutral(0), {{0, 1, 2, 8, 64}, {64}},
                                    "tiles of a worker whose pushes may be under way while it "
                                    "computes on; 0: each push is awaited",
                                    kOnTheCpu),
      named<&Schedule::wgrad>(
          "wgrad", {"separate", "after", "interleaved"}, Neutral(WgradPlacement::kSeparate),
          "weight gradients: launches of their own; ahead of reduce in the last launch; as filler "
          "behind each expert's dfc1",
          kInBackward),
      number<&Schedule::wgrad_run>(
          "wgrad_run", {0, 64}, Neutral(1), {{1, 4}, {0, 1, 2, 4}},
          "tiles of a weight gradient that a worker draws at a time, where an expert has up to 64 "
          "rows; half as many with up to 128, a third with up to 192, and so on, at least one; "
          "0: 8, or fewer where experts have few tiles",
          kInBackward),
  };
  return kAxes;
}

std::string range_text(const AxisInfo& a) {
  std::string text;
  if (!a.choices.empty()) {
    for (const auto& c : a.choices) text += cat(text.empty() ? "" : ", ", c);
    return text;
  }
  // Zero is no power of two: it stands for something else.
  const bool zero_too = a.power_of_two && a.min == 0;
  return cat(zero_too ? "0, or 1" : std::to_string(a.min), " to ", a.max,
             a.power_of_two ? ", a power of two," : "");
}

const Axis& axis_at(std::size_t axis) {
  const std::span<const Axis> all = axes();
  require(axis < all.size(), ErrorCode::kInvalidArgument, "axis is ", axis, "; 0 to ",
          all.size() - 1, " is accepted");
  return all[axis];
}

}  // namespace

std::span<const Axis> axes() { return make_axes(); }

Schedule neutral_schedule(Backend backend) {
  Schedule schedule;
  for (const Axis& axis : axes()) axis.set(schedule, axis.neutral_value(backend));
  return schedule;
}

std::span<const AxisInfo> schedule_axes() {
  static const std::vector<AxisInfo> kInfos = [] {
    std::vector<AxisInfo> infos;
    for (const Axis& a : axes()) infos.push_back(a.info);
    return infos;
  }();
  return kInfos;
}

int axis_value(const Schedule& schedule, std::size_t axis) { return axis_at(axis).get(schedule); }

void set_axis(Schedule& schedule, std::size_t axis, int value) {
  const Axis& a = axis_at(axis);
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
  const std::vector<std::string> names(axis.choices.begin(), axis.choices.end());
  require(axis.choices.empty() && error == std::errc{} && end == text.data() + text.size(),
          ErrorCode::kInvalidArgument, "schedule axis ", axis.name, " is ", in_quotes(text), "; ",
          nearest_clause(text, names), range_text(axis), " is accepted");
  return value;
}

std::string unlike_axes_text(const Schedule& schedule, const Schedule& other) {
  std::string text;
  for (const Axis& axis : axes()) {
    const int value = axis.get(schedule);
    if (value == axis.get(other)) continue;
    text += cat(text.empty() ? "" : ",", axis.info.name, '=', axis_value_text(axis.info, value));
  }
  return text;
}

std::string axis_value_text(const AxisInfo& axis, int value) {
  // A value that is no choice is printed too: schedules are printed before they are validated.
  const bool is_choice = value >= 0 && value < static_cast<int>(axis.choices.size());
  return is_choice ? std::string(axis.choices[static_cast<std::size_t>(value)])
                   : std::to_string(value);
}

}  // namespace uniep
