#pragma once

#include <array>
#include <cstddef>

#include "uniep/problem.h"

namespace uniep::testing {

/// All there are, in the order of their numbers.
inline constexpr auto kActivations = [] {
  std::array<Activation, kNumActivations> all{};
  for (int i = 0; i < kNumActivations; ++i) {
    all[static_cast<std::size_t>(i)] = static_cast<Activation>(i);
  }
  return all;
}();

}  // namespace uniep::testing
