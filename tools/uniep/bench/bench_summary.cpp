#include "bench/bench_summary.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/check.h"
#include "base/quantile.h"
#include "common/table.h"
#include "common/text_columns.h"

namespace uniep::tool {
namespace {

constexpr std::size_t kLongestName = 24;

/// The schedule as it was given, if that is short and says which one it is; else its number.
std::string name_of(const BenchOptions& options, std::size_t schedule) {
  const std::string& given = options.schedules[schedule].given;
  const auto same = std::ranges::count(options.schedules, given, &BenchSchedule::given);
  return same == 1 && columns_of(given) <= kLongestName ? given : cat("schedule ", schedule);
}

/// Seconds of a direction under every schedule; empty where one was not measured.
std::vector<double> seconds_of(const BenchEntry& entry, Pass pass, std::size_t schedules) {
  std::vector<double> seconds;
  for (const auto& passes : entry.report.schedules) {
    const auto found = std::ranges::find(passes, pass, &BenchPass::pass);
    if (found != passes.end()) seconds.push_back(median(pass_seconds(*found)));
  }
  return seconds.size() == schedules ? seconds : std::vector<double>{};
}

/// What is fastest in one direction, and what it is compared with.
struct Fastest {
  Pass pass = Pass::kForward;
  std::size_t best = 0, other = 0;
  double ratio = 1;  ///< how many times as long the other takes
};

/// The fastest schedule by the means of the logarithms of times.
Fastest fastest_of(Pass pass, const std::vector<double>& logs) {
  const auto best = static_cast<std::size_t>(std::ranges::min_element(logs) - logs.begin());
  std::size_t other = 0;
  if (best == 0) {
    other = static_cast<std::size_t>(std::min_element(logs.begin() + 1, logs.end()) - logs.begin());
  }
  return {pass, best, other, std::exp(logs[other] - logs[best])};
}

struct Comparison {
  std::vector<Fastest> directions{};
  std::size_t shapes = 0;
};

Comparison compare(const std::vector<BenchEntry>& entries, const BenchOptions& options) {
  const std::size_t schedules = options.schedules.size();
  Comparison all;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    std::vector<double> logs(schedules, 0);
    std::size_t shapes = 0;
    for (const BenchEntry& entry : entries) {
      const std::vector<double> seconds = seconds_of(entry, pass, schedules);
      if (seconds.empty() || std::ranges::min(seconds) <= 0) continue;
      for (std::size_t s = 0; s < schedules; ++s) logs[s] += std::log(seconds[s]);
      ++shapes;
    }
    if (shapes == 0) continue;
    for (double& log : logs) log /= static_cast<double>(shapes);
    all.directions.push_back(fastest_of(pass, logs));
    all.shapes = std::max(all.shapes, shapes);
  }
  return all;
}

}  // namespace

std::string fastest_text(const std::vector<BenchEntry>& entries, const BenchOptions& options) {
  if (options.schedules.size() < 2) return "";
  const Comparison all = compare(entries, options);
  if (all.directions.empty()) return "";
  const bool one_best = all.directions.front().best == all.directions.back().best;
  std::string text, best, other;
  for (const Fastest& f : all.directions) {
    if (text.empty() || !one_best) {
      best = name_of(options, f.best);
      text += cat(text.empty() ? "fastest: " : "; ", best, one_best ? "" : cat(' ', name(f.pass)));
      other.clear();
    }
    const std::string compared = name_of(options, f.other);
    text += cat(", ", formatted("%.2f", f.ratio), 'x', compared == other ? "" : ' ' + compared,
                one_best ? cat(' ', name(f.pass)) : "");
    other = compared;
  }
  if (all.shapes > 1) text += cat(" (geometric mean over ", all.shapes, " shapes)");
  return text;
}

}  // namespace uniep::tool
