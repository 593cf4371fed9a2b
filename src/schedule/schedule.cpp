#include "uniep/schedule.h"

#include <charconv>
#include <limits>

#include "base/check.h"
#include "base/contract.h"
#include "schedule/axes.h"

namespace uniep {
namespace {

constexpr std::string_view kPipelined = "pipelined:";

constexpr PresetInfo kPresets[] = {
    {"sequential", "every stage its own launch with full barriers (Megatron all-to-all, DeepEP)"},
    {"pipelined:n",
     "n waves, communication of one under computation of the one before (Tutel, "
     "FasterMoE, FSMoE)"},
    {"two-kernel", "dispatch+fc1, then fc2+combine (UniEP, COMET)"},
    {"single", "the whole direction in one launch (FlashMoE, Mega MoE)"},
};

Schedule sequential() {
  Schedule s;
  s.launch = LaunchGrouping::kSeparate;
  s.rotate = SourceRotation::kNone;
  s.dispatch_workers = 1;
  s.push_depth = 0;
  s.wgrad = WgradPlacement::kSeparate;
  return s;
}

Schedule pipelined(std::string_view waves_text) {
  int waves = 0;
  const char* last = waves_text.data() + waves_text.size();
  const auto [end, error] = std::from_chars(waves_text.data(), last, waves);
  require(error == std::errc{} && end == last && waves >= 2 && waves <= 16,
          ErrorCode::kInvalidArgument, "schedule preset pipelined:n has n='", waves_text,
          "'; 2 to 16 is accepted");
  Schedule s;
  s.launch = LaunchGrouping::kPipelined;
  s.waves = waves;
  s.wgrad = WgradPlacement::kSeparate;
  return s;
}

Schedule two_kernel() {
  Schedule s;
  s.launch = LaunchGrouping::kPaired;
  s.wgrad = WgradPlacement::kAfter;
  return s;
}

std::optional<Schedule> find_preset(std::string_view word) {
  if (word == "sequential") return sequential();
  if (word == "two-kernel") return two_kernel();
  if (word == "single") return Schedule{};
  if (word.starts_with(kPipelined)) return pipelined(word.substr(kPipelined.size()));
  return std::nullopt;
}

/// Counters are compared by signed differences of 32 bits.
constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

std::string preset_names() {
  std::string names;
  for (const PresetInfo& p : kPresets) names += cat(names.empty() ? "" : ", ", p.name);
  return names;
}

std::string axis_names() {
  std::string names;
  for (const Axis& a : axes()) names += cat(names.empty() ? "" : ", ", a.info.name);
  return names;
}

void apply_assignment(Schedule& s, std::string_view word) {
  const std::size_t eq = word.find('=');
  require(eq != std::string_view::npos, ErrorCode::kInvalidArgument, "schedule has the word '",
          word, "'; a preset (", preset_names(), ") first, then key=value pairs are accepted");
  const std::string_view key = word.substr(0, eq);
  for (std::size_t i = 0; i < axes().size(); ++i) {
    if (axes()[i].info.name != key) continue;
    set_axis(s, i, parse_axis_value(axes()[i].info, word.substr(eq + 1)));
    return;
  }
  throw Error(ErrorCode::kInvalidArgument,
              cat("schedule has no axis '", key, "'; the axes are ", axis_names()));
}

}  // namespace

std::span<const PresetInfo> schedule_presets() { return kPresets; }

Schedule parse_schedule(std::string_view text) {
  require(!text.empty(), ErrorCode::kInvalidArgument, "schedule is empty; a preset (",
          preset_names(), ") or key=value pairs are accepted");
  Schedule s;
  for (bool first = true;; first = false) {
    const std::size_t comma = text.find(',');
    const std::string_view word = text.substr(0, comma);
    const std::optional<Schedule> preset = first ? find_preset(word) : std::nullopt;
    if (preset) {
      s = *preset;
    } else {
      apply_assignment(s, word);
    }
    if (comma == std::string_view::npos) return s;
    text.remove_prefix(comma + 1);
  }
}

std::string to_string(const Schedule& schedule) {
  std::string text;
  for (const Axis& a : axes()) {
    text +=
        cat(text.empty() ? "" : ",", a.info.name, "=", axis_value_text(a.info, a.get(schedule)));
  }
  return text;
}

std::optional<std::string> invalid_reason(const Schedule& s, const Problem& problem) {
  for (std::size_t i = 0; i < axes().size(); ++i) {
    try {
      Schedule copy = s;
      set_axis(copy, i, axis_value(s, i));
    } catch (const Error& e) {
      return e.what();
    }
  }
  if (s.launch == LaunchGrouping::kPipelined && s.waves < 2) {
    return "launch=pipelined needs at least 2 waves, for there is nothing to overlap in one";
  }
  if (problem.row_align % s.tile_m != 0) {
    return cat("tile_m=", s.tile_m, " does not divide the problem's row_align=", problem.row_align,
               ", so tiles would straddle experts");
  }
  if (std::int64_t{s.token_block} * problem.topk * problem.hidden > kMaxCount) {
    return cat("token_block=", s.token_block, " with topk=", problem.topk,
               " and hidden=", problem.hidden, " makes arrival counters pass ", kMaxCount,
               " in one pass");
  }
  static_assert(64 % kDprobGroup == 0, "the smallest tile_n must hold whole dprobs groups");
  return std::nullopt;
}

void validate(const Schedule& schedule, const Problem& problem) {
  const auto reason = invalid_reason(schedule, problem);
  require(!reason, ErrorCode::kInvalidArgument, "schedule cannot run: ", reason.value_or(""));
}

}  // namespace uniep
