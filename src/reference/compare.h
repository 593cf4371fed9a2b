#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "base/check.h"
#include "uniep/bf16.h"

namespace uniep::reference {

std::vector<double> to_double(std::span<const bf16> values);
std::vector<double> to_double(std::span<const float> values);

/// |got - want| / |want| in the Euclidean norm: 0 where both are zero, infinite where only `want`
/// is, NaN where any element is. Throws Error(kInvalidArgument) where the sizes differ.
double relative_l2(std::span<const double> got, std::span<const double> want);

struct Difference {
  std::int64_t index = -1;  ///< of the first element that differs; -1: none
  std::int64_t count = 0;   ///< how many elements differ
};

/// Compares bits: -0 is not +0, and a NaN equals itself. Throws where the sizes differ.
template <class T>
Difference first_difference(std::span<const T> got, std::span<const T> want) {
  static_assert(std::is_trivially_copyable_v<T>);
  require(got.size() == want.size(), ErrorCode::kInvalidArgument, "comparing ", got.size(),
          " elements with ", want.size());
  Difference difference;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &want[i], sizeof(T)) == 0) continue;
    if (difference.count++ == 0) difference.index = static_cast<std::int64_t>(i);
  }
  return difference;
}

/// first_difference of vectors, from which a template cannot deduce a span.
template <class T>
Difference first_difference(const std::vector<T>& got, const std::vector<T>& want) {
  return first_difference(std::span<const T>(got), std::span<const T>(want));
}

}  // namespace uniep::reference
