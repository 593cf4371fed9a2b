#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/quantile.h"
#include "run/step.h"

namespace uniep::tool {

/// One figure of a stage, over ranks, in every measured step.
struct OverRanks {
  std::vector<double> sum;
  std::vector<double> max;
};

/// `figure(stats of the stage on a rank)` for every step of a direction.
template <class Figure>
OverRanks over_ranks(const PassRecord& record, Stage stage, const Figure& figure) {
  OverRanks all;
  for (const std::vector<PassStats>& ranks : record.stats) {
    double sum = 0;
    double max = 0;
    for (const PassStats& stats : ranks) {
      const auto value = static_cast<double>(figure(stats[stage]));
      sum += value;
      max = std::max(max, value);
    }
    all.sum.push_back(sum);
    all.max.push_back(max);
  }
  return all;
}

/// What a table row and a JSON record say about a stage: medians over the measured steps. Sums and
/// maxima are over ranks; each rank's figure is a sum over its workers.
struct StageFigures {
  Stage stage = Stage::kPlan;
  std::int64_t tasks = 0;
  OverRanks busy_s;
  OverRanks wait_s;
  OverRanks link_s;
};

/// The stages that did or awaited anything, in the order of the enumeration.
std::vector<StageFigures> stage_figures(const PassRecord& record);

/// Bytes over the wire in one direction, all ranks together. The same in every step.
struct WireFigures {
  std::int64_t pulled_no_dedup = 0;
  std::int64_t pulled = 0;
  std::int64_t pushed = 0;
};
WireFigures wire_figures(const PassRecord& record);

/// What the timeline of one direction says, of the last step.
struct TimeFigures {
  double exposed_s = 0;  ///< of the rank with the most, as trace::TimeUse
  double tail_s = 0;     ///< likewise
  double clock_hz = 0;   ///< of the rank with the lowest; 0: not counted
  // Shares of all processors' time.
  std::array<double, kMaxStages> stage{};
  double waiting = 0;
  double idle = 0;

  double of(Stage s) const { return stage[static_cast<std::size_t>(s)]; }
};
/// Nothing where no timeline was recorded, or it has no tasks of this direction.
std::optional<TimeFigures> time_figures(const StepReport& report, Pass pass);

/// Rows of the experts, all ranks together.
struct LoadFigures {
  std::int64_t rows = 0;
  std::int64_t remote_rows = 0;
  std::int64_t min = 0;
  double median = 0;
  std::int64_t max = 0;
  double mean = 0;
};
LoadFigures load_figures(const StepReport& report);
/// "rows per expert: min 84, median 244, max 558, max / mean 2.18"
std::string load_text(const std::vector<std::int64_t>& rows_per_expert);

}  // namespace uniep::tool
