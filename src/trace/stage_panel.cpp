#include <algorithm>
#include <vector>

#include "base/check.h"
#include "trace/numbers.h"
#include "trace/palette.h"
#include "trace/panels.h"

namespace uniep::trace {
namespace {

constexpr double kHeight = 200;
constexpr double kPassGap = 34;
constexpr std::string_view kTitle = "Time per stage";

/// What one rank spent in a stage, and how its bar is called.
struct RankBar {
  std::size_t rank = 0;
  StageStats stats;
  std::string label;
};

/// The bars of one stage of one pass.
struct Group {
  Stage stage = Stage::kPlan;
  std::vector<RankBar> bars;
};

double total(const StageStats& s) { return s.busy_s + s.link_s + s.wait_s; }

/// One a rank; of many ranks those with the least, the median and the most time.
std::vector<RankBar> bars_of(const std::vector<PassStats>& ranks, Stage stage) {
  std::vector<RankBar> bars;
  for (std::size_t r = 0; r < ranks.size(); ++r) bars.push_back({r, ranks[r][stage], cat(r)});
  if (bars.size() <= kRanksInFull) return bars;
  std::ranges::stable_sort(bars, {}, [](const RankBar& b) { return total(b.stats); });
  std::vector<RankBar> chosen{bars.front(), bars[(bars.size() - 1) / 2], bars.back()};
  constexpr const char* kLabels[] = {"min", "med", "max"};
  for (std::size_t i = 0; i < chosen.size(); ++i) chosen[i].label = kLabels[i];
  return chosen;
}

std::vector<Group> groups_of(const std::vector<PassStats>& ranks) {
  std::vector<Group> groups;
  for (int i = 0; i < kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    double sum = 0;
    for (const PassStats& stats : ranks) sum += total(stats[stage]);
    if (sum > 0) groups.push_back({stage, bars_of(ranks, stage)});
  }
  return groups;
}

/// A pass that has something to show.
struct PassGroups {
  Pass pass = Pass::kForward;
  std::vector<Group> groups;
};

std::vector<PassGroups> passes_of(const PlotInput& input) {
  std::vector<PassGroups> passes;
  for (const std::vector<PassStats>& ranks : input.passes) {
    if (ranks.empty()) continue;
    PassGroups p{ranks.front().pass, groups_of(ranks)};
    if (!p.groups.empty()) passes.push_back(std::move(p));
  }
  return passes;
}

/// The times over all ranks, stages and passes.
StageStats sums_of(const PlotInput& input) {
  StageStats sums;
  for (const auto& ranks : input.passes) {
    for (const PassStats& stats : ranks) {
      for (const StageStats& s : stats.stages) {
        sums.busy_s += s.busy_s;
        sums.link_s += s.link_s;
        sums.wait_s += s.wait_s;
      }
    }
  }
  return sums;
}

struct Scale {
  double bottom = 0;
  double pixels_per_second = 0;
};

void draw_bar(Svg& svg, const Scale& scale, double x, double width, Stage stage,
              const RankBar& bar) {
  const StageStats& s = bar.stats;
  const std::string tooltip =
      cat(name(stage), ", rank ", bar.rank, ": ", s.tasks, " tasks, busy ", short_time(s.busy_s),
          ", link ", short_time(s.link_s), ", wait ", short_time(s.wait_s));
  double y = scale.bottom;
  const auto stack = [&](double seconds, Fill fill) {
    const double height = seconds * scale.pixels_per_second;
    y -= height;
    svg.rect(x, y, width, height, fill, tooltip);
  };
  stack(s.busy_s, stage_fill(stage));
  stack(s.link_s, kLinkColor);
  stack(s.wait_s, kWaitColor);
}

constexpr TextStyle kName{12, kTextColor, Anchor::kMiddle};
constexpr double kNameLine = 14;

/// Names of neighbours stand on lines of their own where they are wider than their bars.
bool names_need_two_lines(const std::vector<PassGroups>& passes, double slot) {
  double widest = 0;
  for (const PassGroups& p : passes) {
    for (const Group& group : p.groups) {
      widest = std::max(widest, text_width(name(group.stage), kName));
    }
  }
  return widest + 3 > slot;
}

/// The width that a bar of each stage of all passes has.
double slot_width(const std::vector<PassGroups>& passes) {
  std::size_t groups = 0;
  for (const PassGroups& p : passes) groups += p.groups.size();
  const double gaps = kPassGap * static_cast<double>(passes.size() - 1);
  return (kInnerWidth - gaps) / static_cast<double>(groups);
}

void draw_group(Svg& svg, const Scale& scale, double left, double slot, const Group& group,
                double name_line) {
  constexpr TextStyle kLabel{9, kMutedColor, Anchor::kMiddle};
  const auto count = static_cast<double>(group.bars.size());
  const double bar = std::min(0.9 * slot / count, 42.0);
  const double first = left + (slot - bar * count) / 2;
  const bool labelled = group.bars.size() > 1 && std::ranges::all_of(group.bars, [&](auto& b) {
                          return text_width(b.label, kLabel) + 1 < bar;
                        });
  for (std::size_t i = 0; i < group.bars.size(); ++i) {
    const double x = first + bar * static_cast<double>(i);
    const double gap = bar > 6 ? 1 : bar / 8;
    draw_bar(svg, scale, x + gap, bar - 2 * gap, group.stage, group.bars[i]);
    if (labelled) svg.text(x + bar / 2, scale.bottom + 12, group.bars[i].label, kLabel);
  }
  svg.text(left + slot / 2, scale.bottom + 28 + name_line, name(group.stage), kName);
}

std::string caption(const PlotInput& input) {
  const StageStats sums = sums_of(input);
  std::string s = cat("summed over workers; all ranks together: busy ", short_time(sums.busy_s),
                      ", waiting for the link ", short_time(sums.link_s), ", for inputs ",
                      short_time(sums.wait_s));
  const auto ranks = static_cast<std::size_t>(input.num_ranks);
  if (ranks > kRanksInFull) {
    s += cat("; bars: of ", ranks,
             " ranks those with the least, the median and the most time in the stage");
  } else if (ranks > 1) {
    s += cat("; bars: ranks 0 to ", ranks - 1, ", left to right");
  }
  return s;
}

double draw_legend(Svg& svg, double baseline) {
  const double x = kMarginLeft;
  svg.rect(x, baseline - 10, 6, 12, stage_fill(Stage::kFc1));
  svg.rect(x + 6, baseline - 10, 6, 12, stage_fill(Stage::kDispatch));
  const Key busy{kIdleColor, "busy (below, in the stage's colour)"};
  svg.text(x + 17, baseline, busy.word, {12, kTextColor});
  return draw_keys(svg, x + key_width(busy), baseline,
                   {{kLinkColor, "waiting for the link (in the middle)"},
                    {kWaitColor, "waiting for inputs (on top)"}});
}

void draw_passes(Svg& svg, const std::vector<PassGroups>& passes, const Scale& scale, double top) {
  const double slot = slot_width(passes);
  const double second_line = names_need_two_lines(passes, slot) ? kNameLine : 0;
  double x = kMarginLeft;
  for (const PassGroups& p : passes) {
    const double width = slot * static_cast<double>(p.groups.size());
    if (&p != &passes.front()) {
      const double between = x - kPassGap / 2;
      svg.line(between, top - 12, between, scale.bottom + 32, kAxisColor, 1, true);
    }
    svg.text(x + width / 2, top - 6, name(p.pass), {12, kMutedColor, Anchor::kMiddle, true});
    for (std::size_t i = 0; i < p.groups.size(); ++i) {
      draw_group(svg, scale, x, slot, p.groups[i], i % 2 == 0 ? 0 : second_line);
      x += slot;
    }
    x += kPassGap;
  }
}

}  // namespace

double draw_stage_panel(Svg& svg, const PlotInput& input, double top) {
  const std::vector<PassGroups> passes = passes_of(input);
  if (passes.empty()) {
    const double inner = draw_panel_title(svg, top, kTitle, "summed over workers");
    return draw_absence(svg, inner, "There is nothing to draw: no stage took any time.");
  }
  double longest_s = 0;
  for (const PassGroups& p : passes) {
    for (const Group& group : p.groups) {
      for (const RankBar& bar : group.bars) longest_s = std::max(longest_s, total(bar.stats));
    }
  }
  const double legend = draw_panel_title(svg, top, kTitle, caption(input)) + 6;
  const double inner = draw_legend(svg, legend) + 12;
  const TimeUnit unit = time_unit(longest_s);
  const Axis axis = axis_up_to(longest_s * unit.per_second);
  const Scale scale{inner + kHeight, kHeight * unit.per_second / axis.end};
  draw_y_axis(svg, kMarginLeft, kMarginLeft + kInnerWidth, inner, scale.bottom, axis,
              cat("worker time, ", unit.name));
  draw_passes(svg, passes, scale, inner);
  const bool two = names_need_two_lines(passes, slot_width(passes));
  return scale.bottom + 34 + (two ? kNameLine : 0);
}

}  // namespace uniep::trace
