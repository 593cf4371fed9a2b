#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "uniep/bf16.h"

namespace uniep::cpu::testing {

/// Every instruction set that this machine can run.
inline std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found;
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (const Kernels* k = kernels_for(isa)) found.push_back(k);
  }
  return found;
}

/// Same bits, or both NaN: which NaN an operation returns is left open.
inline bool same(float x, float y) {
  return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y) ||
         (std::isnan(x) && std::isnan(y));
}
inline bool same(bf16 x, bf16 y) { return x == y || same(to_float(x), to_float(y)); }

inline std::string show(float v) {
  char text[64];
  std::snprintf(text, sizeof text, "%a (0x%08x)", static_cast<double>(v),
                std::bit_cast<std::uint32_t>(v));
  return text;
}
inline std::string show(bf16 v) { return show(to_float(v)); }

/// Compares two arrays with same() and reports the first difference.
template <class T>
::testing::AssertionResult all_same(const std::vector<T>& got, const std::vector<T>& want) {
  if (got.size() != want.size()) return ::testing::AssertionFailure() << "sizes differ";
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!same(got[i], want[i])) {
      return ::testing::AssertionFailure() << "element " << i << " of " << got.size() << " is "
                                           << show(got[i]) << ", not " << show(want[i]);
    }
  }
  return ::testing::AssertionSuccess();
}

/// What a matrix or row is filled with.
enum class Values {
  kOrdinary,   // around 1, with zeros
  kTiny,       // products are subnormal or underflow
  kHuge,       // products overflow, sums of both signs
  kWide,       // exponents from -107 to 22
  kSubnormal,  // subnormal and small numbers
  kAnything,   // any bits but NaN: zeros, subnormals, infinities
};
inline constexpr Values kAllValues[] = {Values::kOrdinary, Values::kTiny,      Values::kHuge,
                                        Values::kWide,     Values::kSubnormal, Values::kAnything};

inline bf16 random_bf16(std::mt19937& rng, Values values) {
  const auto bits = static_cast<std::uint32_t>(rng());
  const std::uint32_t sign_and_fraction = bits & 0x807fu;
  const std::uint32_t pick = bits >> 16;
  const auto with_exponent = [&](std::uint32_t low, std::uint32_t count) {
    return bf16{static_cast<std::uint16_t>(sign_and_fraction | (low + pick % count) << 7)};
  };
  if (pick % 61 == 60) return bf16{static_cast<std::uint16_t>(bits & 0x8000u)};
  switch (values) {
    case Values::kOrdinary:
      return with_exponent(117, 12);
    case Values::kTiny:
      return with_exponent(47, 24);
    case Values::kHuge:
      return with_exponent(185, 8);
    case Values::kWide:
      return with_exponent(20, 130);
    case Values::kSubnormal:
      return with_exponent(0, 3);
    case Values::kAnything:
      break;
  }
  const bf16 any{static_cast<std::uint16_t>(bits)};
  return std::isnan(to_float(any)) ? bf16{0x7f80} : any;
}

/// An accumulator: a bf16 with random lower bits.
inline float random_float(std::mt19937& rng, Values values) {
  const float v = to_float(random_bf16(rng, values));
  if (v == 0 || std::isinf(v)) return v;
  const auto lower = static_cast<std::uint32_t>(rng()) & 0xffffu;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(v) | lower);
}

}  // namespace uniep::cpu::testing
