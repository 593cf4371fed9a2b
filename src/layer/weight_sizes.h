#pragma once

#include <cstdint>

#include "uniep/problem.h"

namespace uniep {

/// Elements of the weights of a rank that has `experts` experts; 0 of those that a layer lacks.
struct WeightSizes {
  std::int64_t w1, w2, b1, b2, shared_w1, shared_w2;
};

constexpr WeightSizes weight_sizes(const Problem& p, std::int64_t experts) {
  const std::int64_t w1_rows = experts * halves(p) * p.intermediate;
  const std::int64_t w2_rows = experts * p.hidden;
  const std::int64_t shared = p.shared_experts * p.hidden * p.intermediate;
  return {.w1 = w1_rows * p.hidden,
          .w2 = w2_rows * p.intermediate,
          .b1 = p.bias ? w1_rows : 0,
          .b2 = p.bias ? w2_rows : 0,
          .shared_w1 = halves(p) * shared,
          .shared_w2 = shared};
}

}  // namespace uniep
