#include "uniep/schedule.h"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "base/check.h"
#include "base/nearest.h"
#include "base/quotes.h"
#include "schedule/axes.h"

namespace uniep {
namespace {

constexpr PresetInfo kPresets[] = {
    {"sequential", "every stage its own launch with full barriers (Megatron all-to-all, DeepEP)",
     "launch=separate,waves=1,dispatch_workers=1,rotate=none,push_depth=0,wgrad=separate"},
    {"pipelined:n",
     "n waves, communication of one under computation of the one before (Tutel, "
     "FasterMoE, FSMoE)",
     "launch=pipelined,waves=n,wgrad=separate"},
    {"two-kernel", "dispatch+fc1, then fc2+combine (UniEP, COMET)",
     "launch=paired,waves=1,wgrad=after"},
    {"single", "the whole direction in one launch (FlashMoE, Mega MoE)",
     "launch=single,waves=1,wgrad=interleaved"},
};

constexpr std::string_view kPipelined = "pipelined:";

void require_waves(std::string_view text) {
  int waves = 0;
  const char* last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, waves);
  require(error == std::errc{} && end == last && waves >= 2 && waves <= 16,
          ErrorCode::kInvalidArgument, "schedule preset pipelined:n has n=", in_quotes(text),
          "; 2 to 16 is accepted");
}

/// The key=value pairs that a preset stands for; nothing where `word` names none.
std::optional<std::string> preset_pairs(std::string_view word) {
  const bool pipelined = word.starts_with(kPipelined);
  const std::string_view name = pipelined ? "pipelined:n" : word;
  const auto* preset = std::ranges::find(kPresets, name, &PresetInfo::name);
  if (preset == std::end(kPresets)) return std::nullopt;
  std::string pairs(preset->sets);
  if (!pipelined) return pairs;
  const std::string_view n = word.substr(kPipelined.size());
  require_waves(n);
  return pairs.replace(pairs.find("=n") + 1, 1, n);
}

std::string preset_names() {
  std::string names;
  for (const PresetInfo& p : kPresets) names += cat(names.empty() ? "" : ", ", p.name);
  return names;
}

/// What may stand in front, up to the number of `pipelined:n`.
std::vector<std::string> preset_words() {
  std::vector<std::string> words;
  for (const PresetInfo& p : kPresets) words.emplace_back(p.name.substr(0, p.name.find(':')));
  return words;
}

std::vector<std::string> axis_names() {
  std::vector<std::string> names;
  for (const Axis& a : axes()) names.emplace_back(a.info.name);
  return names;
}

std::string axis_list() {
  std::string list;
  for (const std::string& name : axis_names()) list += cat(list.empty() ? "" : ", ", name);
  return list;
}

/// The preset that a word which is no pair was meant to be, with its number if it takes one.
std::string nearest_preset(std::string_view word) {
  return nearest_clause(word.substr(0, word.find(':')), preset_words());
}

void apply_assignment(Schedule& s, std::string_view word) {
  const std::size_t eq = word.find('=');
  require(eq != std::string_view::npos, ErrorCode::kInvalidArgument, "schedule has the word ",
          in_quotes(word), "; ", nearest_preset(word), "a preset (", preset_names(),
          ") first, then key=value pairs are accepted");
  const std::string_view key = word.substr(0, eq);
  for (std::size_t i = 0; i < axes().size(); ++i) {
    if (axes()[i].info.name != key) continue;
    set_axis(s, i, parse_axis_value(axes()[i].info, word.substr(eq + 1)));
    return;
  }
  throw Error(ErrorCode::kInvalidArgument,
              cat("schedule has no axis ", in_quotes(key), "; ", nearest_clause(key, axis_names()),
                  "the axes are ", axis_list()));
}

}  // namespace

std::span<const PresetInfo> schedule_presets() { return kPresets; }

Schedule default_schedule(Backend backend) {
  Schedule s;
  if (backend == Backend::kCpu) return s;
  // The CUDA backend has tiles of 128 rows. The rest is what served five models best on 4 H200
  // (docs/performance.md).
  s.dispatch_workers = 24;
  s.pull_tokens = 0;
  s.tile_m = 128;
  s.tile_n = 256;
  s.band = 16;
  s.lag_tiles = 512;
  s.head_start = 40;
  s.mix_run = 16;
  s.ready_rows = 128;
  s.token_block = 0;
  s.wgrad_run = 0;
  return s;
}

Schedule parse_schedule(std::string_view text, const Schedule& base) {
  require(!text.empty(), ErrorCode::kInvalidArgument, "schedule is empty; a preset (",
          preset_names(), ") or key=value pairs are accepted");
  Schedule s = base;
  for (bool first = true;; first = false) {
    const std::size_t comma = text.find(',');
    const std::string_view word = text.substr(0, comma);
    const std::optional<std::string> preset = first ? preset_pairs(word) : std::nullopt;
    if (preset) {
      s = parse_schedule(*preset, base);
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

}  // namespace uniep
