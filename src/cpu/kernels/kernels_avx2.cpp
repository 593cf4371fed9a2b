// The kernels for AVX2 and FMA. Compiled with those flags: call nothing here that another
// translation unit might share (see gemm_impl.h).
#include <immintrin.h>

#include "cpu/kernels/isa.h"

namespace uniep::cpu {
namespace {

struct Simd {
  static constexpr int kWidth = 8;
  static constexpr int kRows = 6;  // 6 x 2 accumulators, 2 of b, 1 of a: 15 of 16 registers
  static constexpr bool kNativeFma = true;
  typedef float F __attribute__((vector_size(32)));
  typedef std::uint32_t U __attribute__((vector_size(32)));

  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

  /// 4 x 4 inside each 128-bit lane.
  static void transpose_lanes(U* r) {
    const auto v = [](U u) { return reinterpret_cast<__m256i>(u); };
    const __m256i t0 = _mm256_unpacklo_epi32(v(r[0]), v(r[1]));
    const __m256i t1 = _mm256_unpacklo_epi32(v(r[2]), v(r[3]));
    const __m256i t2 = _mm256_unpackhi_epi32(v(r[0]), v(r[1]));
    const __m256i t3 = _mm256_unpackhi_epi32(v(r[2]), v(r[3]));
    r[0] = reinterpret_cast<U>(_mm256_unpacklo_epi64(t0, t1));
    r[1] = reinterpret_cast<U>(_mm256_unpackhi_epi64(t0, t1));
    r[2] = reinterpret_cast<U>(_mm256_unpacklo_epi64(t2, t3));
    r[3] = reinterpret_cast<U>(_mm256_unpackhi_epi64(t2, t3));
  }

  static void transpose(U* r) {
    transpose_lanes(r);
    transpose_lanes(r + 4);
    for (int i = 0; i < 4; ++i) {
      const __m256i low = reinterpret_cast<__m256i>(r[i]);
      const __m256i high = reinterpret_cast<__m256i>(r[i + 4]);
      r[i] = reinterpret_cast<U>(_mm256_permute2x128_si256(low, high, 0x20));
      r[i + 4] = reinterpret_cast<U>(_mm256_permute2x128_si256(low, high, 0x31));
    }
  }
};

}  // namespace
}  // namespace uniep::cpu

#include "cpu/kernels/gemm_impl.h"
#include "cpu/kernels/rows_impl.h"

namespace uniep::cpu {

constinit const Kernels kAvx2Kernels = {.isa = Isa::kAvx2,
                                        .name = "avx2",
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
