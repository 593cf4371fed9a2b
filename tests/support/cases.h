#pragma once

#include <algorithm>
#include <cstdlib>

namespace uniep::testing {

/// Random cases in a test; UNIEP_TEST_CASES multiplies them (sanitizers are slow, nights are long).
inline int cases(int count) {
  const char* factor = std::getenv("UNIEP_TEST_CASES");
  return factor == nullptr ? count : std::max(1, static_cast<int>(count * std::atof(factor)));
}

/// A time limit that a test wants to see expire, longer where a sanitizer slows everything down.
constexpr int short_limit_ms() {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return 1500;
#else
  return 300;
#endif
}

}  // namespace uniep::testing
