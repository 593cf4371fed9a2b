#include <vector>

#include "base/check.h"
#include "trace/panels.h"

namespace uniep::trace {
namespace {

constexpr double kHeight = 200;
constexpr double kPassGap = 34;

/// The bars of one stage of one pass, one a rank.
struct Group {
  Stage stage = Stage::kPlan;
  std::vector<StageStats> by_rank;
};

double total(const StageStats& s) { return s.busy_s + s.link_s + s.wait_s; }

std::vector<Group> groups_of(const std::vector<PassStats>& ranks) {
  std::vector<Group> groups;
  for (int i = 0; i < kNumStages; ++i) {
    Group group{static_cast<Stage>(i), {}};
    double sum = 0;
    for (const PassStats& stats : ranks) {
      group.by_rank.push_back(stats[group.stage]);
      sum += total(stats[group.stage]) + static_cast<double>(stats[group.stage].tasks);
    }
    if (sum > 0) groups.push_back(std::move(group));
  }
  return groups;
}

struct Sums {
  double busy_s = 0;
  double link_s = 0;
  double wait_s = 0;
  double longest_s = 0;
  std::size_t groups = 0;
};

Sums sums_of(const std::vector<std::vector<Group>>& passes) {
  Sums sums;
  for (const auto& groups : passes) {
    sums.groups += groups.size();
    for (const Group& group : groups) {
      for (const StageStats& s : group.by_rank) {
        sums.busy_s += s.busy_s;
        sums.link_s += s.link_s;
        sums.wait_s += s.wait_s;
        sums.longest_s = std::max(sums.longest_s, total(s));
      }
    }
  }
  return sums;
}

struct Scale {
  double bottom = 0;
  double pixels_per_second = 0;
};

void draw_bar(Svg& svg, const Scale& scale, double x, double width, Stage stage, int rank,
              const StageStats& s) {
  const std::string tooltip =
      cat(name(stage), ", rank ", rank, ": ", s.tasks, " tasks, busy ", short_time(s.busy_s),
          ", link ", short_time(s.link_s), ", wait ", short_time(s.wait_s));
  double y = scale.bottom;
  const auto stack = [&](double seconds, std::string_view color) {
    const double height = seconds * scale.pixels_per_second;
    y -= height;
    svg.rect(x, y, width, height, color, tooltip);
  };
  stack(s.busy_s, stage_color(stage));
  stack(s.link_s, kLinkColor);
  stack(s.wait_s, kWaitColor);
}

void draw_group(Svg& svg, const Scale& scale, double left, double slot, const Group& group) {
  const auto ranks = static_cast<double>(group.by_rank.size());
  const double bar = std::min(0.8 * slot / ranks, 42.0);
  const double first = left + (slot - bar * ranks) / 2;
  const bool numbered = group.by_rank.size() > 1 && bar >= 11;
  for (std::size_t r = 0; r < group.by_rank.size(); ++r) {
    const double x = first + bar * static_cast<double>(r);
    const double gap = bar > 6 ? 1 : bar / 8;
    draw_bar(svg, scale, x + gap, bar - 2 * gap, group.stage, static_cast<int>(r),
             group.by_rank[r]);
    if (numbered) {
      svg.text(x + bar / 2, scale.bottom + 13, cat(r), {10, kMutedColor, Anchor::kMiddle});
    }
  }
  svg.text(left + slot / 2, scale.bottom + 29, name(group.stage),
           {12, kTextColor, Anchor::kMiddle});
}

std::string caption(const PlotInput& input, const Sums& sums) {
  std::string s = cat("summed over workers; all ranks together: busy ", short_time(sums.busy_s),
                      ", waiting for the link ", short_time(sums.link_s), ", for inputs ",
                      short_time(sums.wait_s));
  if (input.num_ranks > 1) s += cat("; bars: ranks 0 to ", input.num_ranks - 1, ", left to right");
  return s;
}

void draw_legend(Svg& svg, double baseline) {
  double x = kPlotWidth - kMarginRight - 396;
  svg.rect(x, baseline - 10, 6, 12, stage_color(Stage::kFc1));
  svg.rect(x + 6, baseline - 10, 6, 12, stage_color(Stage::kDispatch));
  svg.text(x + 17, baseline, "busy (stage's colour)", {12, kTextColor});
  x = draw_key(svg, x + 170, baseline, kLinkColor, "wait for link");
  draw_key(svg, x, baseline, kWaitColor, "wait for inputs");
}

}  // namespace

double draw_stage_panel(Svg& svg, const PlotInput& input, double top) {
  std::vector<std::vector<Group>> passes;
  for (const auto& ranks : input.passes) passes.push_back(groups_of(ranks));
  const Sums sums = sums_of(passes);
  if (sums.groups == 0) return top;

  const double inner = draw_panel_title(svg, top, "Time per stage", caption(input, sums)) + 14;
  draw_legend(svg, top + 16);
  const TimeUnit unit = time_unit(sums.longest_s);
  const double end = axis_end(sums.longest_s * unit.per_second);
  const Scale scale{inner + kHeight, kHeight * unit.per_second / end};
  draw_y_axis(svg, kMarginLeft, kMarginLeft + kInnerWidth, inner, scale.bottom, end,
              cat("worker time, ", unit.name));

  const double gaps = kPassGap * static_cast<double>(passes.size() - 1);
  const double slot = (kInnerWidth - gaps) / static_cast<double>(sums.groups);
  double x = kMarginLeft;
  for (std::size_t p = 0; p < passes.size(); ++p) {
    const double width = slot * static_cast<double>(passes[p].size());
    if (p > 0) {
      svg.line(x - kPassGap / 2, inner - 12, x - kPassGap / 2, scale.bottom + 34, kAxisColor, 1,
               true);
    }
    svg.text(x + width / 2, inner - 4, name(input.passes[p].front().pass),
             {12, kMutedColor, Anchor::kMiddle, true});
    for (const Group& group : passes[p]) {
      draw_group(svg, scale, x, slot, group);
      x += slot;
    }
    x += kPassGap;
  }
  return scale.bottom + 40;
}

}  // namespace uniep::trace
