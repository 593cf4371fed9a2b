// The kernels for AVX-512. Compiled with those flags: call nothing here that another translation
// unit might share (see gemm_impl.h).
// GCC 12 warns falsely about the undefined vectors inside its own intrinsics (its bug 105593).
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "cpu/kernels/isa.h"

namespace uniep::cpu {
namespace {

struct Simd {
  static constexpr int kWidth = 16;
  static constexpr int kRows = 14;  // 14 x 2 accumulators, 2 of b, 1 of a: 31 of 32 registers
  static constexpr bool kNativeFma = true;
  typedef float F __attribute__((vector_size(64)));
  typedef std::uint32_t U __attribute__((vector_size(64)));

  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  /// 4 x 4 inside each 128-bit lane.
  static void transpose_lanes(U* r) {
    const auto v = [](U u) { return reinterpret_cast<__m512i>(u); };
    const __m512i t0 = _mm512_unpacklo_epi32(v(r[0]), v(r[1]));
    const __m512i t1 = _mm512_unpacklo_epi32(v(r[2]), v(r[3]));
    const __m512i t2 = _mm512_unpackhi_epi32(v(r[0]), v(r[1]));
    const __m512i t3 = _mm512_unpackhi_epi32(v(r[2]), v(r[3]));
    r[0] = reinterpret_cast<U>(_mm512_unpacklo_epi64(t0, t1));
    r[1] = reinterpret_cast<U>(_mm512_unpackhi_epi64(t0, t1));
    r[2] = reinterpret_cast<U>(_mm512_unpacklo_epi64(t2, t3));
    r[3] = reinterpret_cast<U>(_mm512_unpackhi_epi64(t2, t3));
  }

  static void transpose(U* r) {
    for (int i = 0; i < 16; i += 4) transpose_lanes(r + i);
    // Then the 4 x 4 lanes of r[i], r[i + 4], r[i + 8], r[i + 12].
    for (int i = 0; i < 4; ++i) {
      const auto v = [r](int j) { return reinterpret_cast<__m512i>(r[j]); };
      const __m512i t0 = _mm512_shuffle_i32x4(v(i), v(i + 4), 0x44);
      const __m512i t1 = _mm512_shuffle_i32x4(v(i + 8), v(i + 12), 0x44);
      const __m512i t2 = _mm512_shuffle_i32x4(v(i), v(i + 4), 0xee);
      const __m512i t3 = _mm512_shuffle_i32x4(v(i + 8), v(i + 12), 0xee);
      r[i] = reinterpret_cast<U>(_mm512_shuffle_i32x4(t0, t1, 0x88));
      r[i + 4] = reinterpret_cast<U>(_mm512_shuffle_i32x4(t0, t1, 0xdd));
      r[i + 8] = reinterpret_cast<U>(_mm512_shuffle_i32x4(t2, t3, 0x88));
      r[i + 12] = reinterpret_cast<U>(_mm512_shuffle_i32x4(t2, t3, 0xdd));
    }
  }
};

}  // namespace
}  // namespace uniep::cpu

#include "cpu/kernels/gemm_impl.h"
#include "cpu/kernels/rows_impl.h"

namespace uniep::cpu {

constinit const Kernels kAvx512Kernels = {.isa = Isa::kAvx512,
                                          .name = "avx512",
                                          .gemm = gemm,
                                          .activations = kActivationRows,
                                          .round_row = round_row,
                                          .add_row = add_row,
                                          .add_scaled_row = add_scaled_row,
                                          .add_bias_row = add_bias_row,
                                          .scale_row = scale_row,
                                          .dot_row = dot_row,
                                          .add_f32_row = add_f32_row,
                                          .add_bf16_row = add_bf16_row};

}  // namespace uniep::cpu
