#include "workload/skew.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "workload/synthetic.h"

namespace uniep::workload {
namespace {

constexpr int kSteps = 80;
constexpr double kStep = kMostMeasuredSkew / kSteps;
constexpr std::int64_t kMostLogits = 1 << 19;  // of a routing that is tried: tens of milliseconds

double sum_of(std::span<const std::int64_t> rows) {
  return static_cast<double>(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}));
}

/// The squared coefficient of variation, without what chance adds to an even load: comparable
/// between few tokens and many.
double unevenness(std::span<const std::int64_t> rows) {
  const double mean = sum_of(rows) / static_cast<double>(rows.size());
  double squares = 0;
  for (const std::int64_t r : rows) {
    const double off = static_cast<double>(r) / mean - 1;
    squares += off * off;
  }
  return squares / static_cast<double>(rows.size()) - 1 / mean;
}

double unevenness_of_made_up(std::int64_t tokens, int experts, int topk, double skew) {
  const ShapeSpec spec{.name = "custom",
                       .tokens = tokens,
                       .hidden = 8,
                       .intermediate = 8,
                       .num_experts = experts,
                       .topk = topk};
  std::vector<std::int64_t> rows(static_cast<std::size_t>(experts));
  for (const std::int32_t id : make_routing(spec, 1, 0, skew).topk_ids) {
    ++rows[static_cast<std::size_t>(id)];
  }
  return unevenness(rows);
}

}  // namespace

double measured_skew(std::span<const std::int64_t> rows_per_expert, int topk) {
  const auto experts = static_cast<int>(rows_per_expert.size());
  const double rows = sum_of(rows_per_expert);
  if (experts <= topk || rows == 0) return 0;
  const std::int64_t tokens = std::clamp<std::int64_t>(
      static_cast<std::int64_t>(rows) / topk, 1, std::max<std::int64_t>(1, kMostLogits / experts));
  const double measured = unevenness(rows_per_expert);
  const auto less_even = [&](int step) {
    return unevenness_of_made_up(tokens, experts, topk, step * kStep);
  };
  int low = 0, high = kSteps;  // unevenness grows with the skew
  while (low < high) {
    const int middle = (low + high) / 2;
    less_even(middle) < measured ? low = middle + 1 : high = middle;
  }
  if (low > 0 && measured - less_even(low - 1) < less_even(low) - measured) --low;
  return low * kStep;
}

double skew_of(const LayerData& layer) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(layer.num_experts));
  for (const std::int32_t id : layer.topk_ids) {
    if (id >= 0) ++rows[static_cast<std::size_t>(id)];  // else a dropped slot
  }
  return measured_skew(rows, layer.topk);
}

}  // namespace uniep::workload
