#include "tune/search/explain.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/quantile.h"

namespace uniep::tune {
namespace {

struct Part {
  std::string what;
  double seconds;
};

std::vector<Part> parts_of(const Breakdown& b) {
  std::vector<Part> parts;
  for (int i = 0; i < kNumStages; ++i) {
    parts.push_back(
        {std::string("in ") + name(static_cast<Stage>(i)), b.busy[static_cast<std::size_t>(i)]});
  }
  parts.push_back({"waiting for inputs", b.wait});
  parts.push_back({"waiting for the link", b.link});
  parts.push_back({"between tasks and launches", b.rest});
  return parts;
}

double total(const Breakdown& b) {
  double sum = 0;
  for (const Part& p : parts_of(b)) sum += p.seconds;
  return sum;
}

std::string listed(const std::vector<Part>& parts, const char* word) {
  std::string text;
  for (const Part& p : parts) {
    char line[96];
    std::snprintf(line, sizeof line, "%s%.3f ms %s %s", text.empty() ? "" : ", ",
                  1e3 * std::abs(p.seconds), word, p.what.c_str());
    text += line;
  }
  return text;
}

}  // namespace

Breakdown breakdown_of(const std::vector<PassStats>& by_rank) {
  Breakdown b;
  double elapsed = 0;
  for (const PassStats& stats : by_rank) {
    const double share = 1.0 / (std::max(1, stats.workers) * static_cast<double>(by_rank.size()));
    elapsed += stats.elapsed_s / static_cast<double>(by_rank.size());
    for (std::size_t s = 0; s < stats.stages.size(); ++s) {
      b.busy[s] += share * stats.stages[s].busy_s;
      b.wait += share * stats.stages[s].wait_s;
      b.link += share * stats.stages[s].link_s;
    }
  }
  b.rest = elapsed - total(b);
  return b;
}

Breakdown median_of(const std::vector<Breakdown>& passes) {
  Breakdown m;
  const auto median = [&](auto&& part) {
    std::vector<double> values;
    for (const Breakdown& b : passes) values.push_back(part(b));
    return uniep::median(std::move(values));
  };
  for (std::size_t s = 0; s < m.busy.size(); ++s) {
    m.busy[s] = median([s](const Breakdown& b) { return b.busy[s]; });
  }
  m.wait = median([](const Breakdown& b) { return b.wait; });
  m.link = median([](const Breakdown& b) { return b.link; });
  m.rest = median([](const Breakdown& b) { return b.rest; });
  return m;
}

std::string explain(const Breakdown& a, const Breakdown& base) {
  const double least = std::max(total(a), total(base)) / 50;
  const std::vector<Part> of_a = parts_of(a);
  const std::vector<Part> of_base = parts_of(base);
  std::vector<Part> less, more;
  for (std::size_t i = 0; i < of_a.size(); ++i) {
    const double change = of_a[i].seconds - of_base[i].seconds;
    if (std::abs(change) < least) continue;
    (change < 0 ? less : more).push_back({of_a[i].what, change});
  }
  const auto larger = [](const Part& p) { return -std::abs(p.seconds); };
  std::ranges::sort(less, {}, larger);
  std::ranges::sort(more, {}, larger);
  if (less.empty() && more.empty()) return "no part differs by a fiftieth of the time";
  const std::string gains = listed(less, "less");
  const std::string losses = listed(more, "more");
  return gains + (gains.empty() || losses.empty() ? "" : "; ") + losses;
}

}  // namespace uniep::tune
