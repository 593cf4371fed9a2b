#pragma once

#include <cstdint>

#include "uniep/macros.h"

namespace uniep {

/// Brain floating point: the upper half of an IEEE binary32. Storage only; arithmetic is done in
/// fp32 (or fp64 in the reference) after `to_float`.
struct bf16 {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(bf16, bf16) = default;  ///< bitwise: -0 != +0, NaN == same NaN
};

// The compiler's own bit cast, not `std::bit_cast`: that is a function of the host, and in a kernel
// of somebody who builds without `--expt-relaxed-constexpr` nvcc makes nothing of it, with a
// warning.

/// Exact.
constexpr UNIEP_HD float to_float(bf16 v) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(v.bits) << 16);
}

/// Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
constexpr UNIEP_HD bf16 to_bf16(float v) {
  const auto u = __builtin_bit_cast(std::uint32_t, v);
  if ((u & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<std::uint16_t>((u >> 16) | 0x0040u)};
  }
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

}  // namespace uniep
