#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace uniep {

/// The value below which `share` of the sorted values lie, between neighbours by linear
/// interpolation (as numpy's default does). 0 of nothing.
inline double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const double at = share * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(std::floor(at));
  const std::size_t high = std::min(low + 1, values.size() - 1);
  const double part = at - std::floor(at);
  return values[low] + part * (values[high] - values[low]);
}

inline double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

}  // namespace uniep
