#pragma once

#include <cstdint>

#include "uniep/macros.h"

// Always inlined, so that a source compiled with -mavx512f never emits a shared copy that the
// linker could then pick for code that must run on older CPUs.
#define UNIEP_FORCE_INLINE inline __attribute__((always_inline))

namespace uniep {

// The fp32 functions that activations are made of, from basic IEEE operations only: every compiler,
// vector width and backend gives the same bits, as long as it does not contract to FMA
// (-ffp-contract=off, nvcc -fmad=false). Branch-free, so loops over them vectorise.

/// `yes ? replacement : x` by masking bits: GCC turns the conditional expression back into branches
/// and then does not vectorise.
UNIEP_FORCE_INLINE UNIEP_HD float replace_if(bool yes, float replacement, float x) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(yes);
  return __builtin_bit_cast(float, (__builtin_bit_cast(std::uint32_t, x) & ~mask) |
                                       (__builtin_bit_cast(std::uint32_t, replacement) & mask));
}

/// exp(v) of -110 <= v <= 100 or a NaN, with a relative error of at most 6e-11.
UNIEP_FORCE_INLINE UNIEP_HD double exp_in_range(double v) {
  // exp(v) = 2^n exp(r), |r| <= ln(2)/2. Adding 1.5 * 2^52 rounds to an integer, and leaves n in
  // the low bits of the sum, from where it is shifted into an exponent.
  constexpr double kShift = 0x1.8p52;
  const double shifted = v * 0x1.71547652b82fep+0 + kShift;
  const double n = shifted - kShift;
  const double r = v - n * 0x1.62e42fefa39efp-1;
  const std::uint64_t exponent = (__builtin_bit_cast(std::uint64_t, shifted) + 1023u) << 52;
  const double scale = __builtin_bit_cast(double, exponent);

  // The polynomial through 8 Chebyshev nodes of the interval, wrong by at most 6e-11 (0.001 ulp of
  // fp32). Summed as a tree: the chain of Horner's rule keeps vector units waiting.
  const double r2 = r * r;
  const double p01 = 0.9999999999595618 + 0.999999999995509 * r;
  const double p23 = 0.5000000107729166 + 0.16666666786308587 * r;
  const double p45 = 0.041666218319291945 + 0.008333283538708528 * r;
  const double p67 = 0.0013948578326459795 + 0.0001990756931084829 * r;
  const double p = (p01 + p23 * r2) + (p45 + p67 * r2) * (r2 * r2);
  return p * scale;
}

/// exp(x), wrong by at most 0.51 ulp, subnormal results included. inf -> inf, -inf -> +0,
/// NaN -> NaN.
UNIEP_FORCE_INLINE UNIEP_HD float exp_f32(float x) {
  // Evaluated in double and rounded once. Beyond these bounds the rounded result is inf or 0; a NaN
  // compares false and passes through.
  const double v = replace_if(x < -110.0f, -110.0f, replace_if(x > 100.0f, 100.0f, x));
  return static_cast<float>(exp_in_range(v));
}

/// tanh(x), off by at most 1e-10, at most 2e-9 of its value, and the rounding. Beyond 10 it rounds
/// to 1. tanh(+-0) = +-0.
UNIEP_FORCE_INLINE UNIEP_HD float tanh_f32(float x) {
  const double v = replace_if(x < -10.0f, -10.0f, replace_if(x > 10.0f, 10.0f, x));
  const double e = exp_in_range(2 * v);
  const auto far = static_cast<float>((e - 1) / (e + 1));
  // Near 0 that difference would be the error of exp: four terms of the series, the next of which
  // is less than 1e-11 of the value.
  const double v2 = v * v;
  const double series = v * (1 + v2 * (-1.0 / 3 + v2 * (2.0 / 15 + v2 * (-17.0 / 315))));
  return replace_if(x > -0.0625f && x < 0.0625f, static_cast<float>(series), far);
}

/// erf(x), off by at most 1e-9 and the rounding: what activations use is 1 + erf(x). Beyond 4 it
/// rounds to 1.
UNIEP_FORCE_INLINE UNIEP_HD float erf_f32(float x) {
  const double v = replace_if(x < -4.0f, -4.0f, replace_if(x > 4.0f, 4.0f, x));
  const double m = __builtin_fabs(v);
  // 1 - exp(-m^2) P(t): the polynomial through 10 Chebyshev nodes of exp(m^2) erfc(m) in t, as a
  // tree (exp_in_range).
  const double t = 1 / (1 + 0.35 * m);
  const double t2 = t * t;
  const double t4 = t2 * t2;
  const double p01 = -0.00015082892515336376 + 0.2003979794576761 * t;
  const double p23 = 0.17251369025208352 + 0.30811703557822889 * t;
  const double p45 = -0.22508635995003179 + 0.93620981125425262 * t;
  const double p67 = -1.0417088377707995 + 1.0562795575917372 * t;
  const double p89 = -0.48890502231517519 + 0.082332975057798158 * t;
  const double p = (p01 + p23 * t2) + ((p45 + p67 * t2) + p89 * t4) * t4;
  const double erfc = exp_in_range(-m * m) * p;
  return static_cast<float>(__builtin_copysign(1 - erfc, v));
}

/// s(z) = 1 / (1 + exp(-z)). Below z = -88.8, exp overflows and s is +0.
UNIEP_FORCE_INLINE UNIEP_HD float sigmoid(float z) { return 1.0f / (1.0f + exp_f32(-z)); }

/// silu(z) = z s. Large |z|: z or -0. silu(-inf) = -inf * 0 = NaN, as the definition says (and as
/// PyTorch computes it), although the limit is 0.
UNIEP_FORCE_INLINE UNIEP_HD float silu(float z, float s) { return z * s; }
UNIEP_FORCE_INLINE UNIEP_HD float silu(float z) { return silu(z, sigmoid(z)); }

/// silu'(z) = s (1 + z (1 - s)). Large |z|: 1 or 0. silu'(+-inf) = NaN, from inf * 0.
UNIEP_FORCE_INLINE UNIEP_HD float silu_grad(float z, float s) {
  return s * (1.0f + z * (1.0f - s));
}
UNIEP_FORCE_INLINE UNIEP_HD float silu_grad(float z) { return silu_grad(z, sigmoid(z)); }

}  // namespace uniep
