// The kernels of any CPU. GCC's generic vectors become SSE2, NEON or plain scalars.
#include "cpu/kernels/isa.h"

namespace uniep::cpu {
namespace {

struct Simd {
  static constexpr int kWidth = 4;
  static constexpr int kRows = 4;
  typedef float F __attribute__((vector_size(16)));
  typedef std::uint32_t U __attribute__((vector_size(16)));

#ifdef __FP_FAST_FMAF
  static constexpr bool kNativeFma = true;
  static F fma(F a, F b, F c) {
    return F{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]),
             __builtin_fmaf(a[2], b[2], c[2]), __builtin_fmaf(a[3], b[3], c[3])};
  }
#else
  static constexpr bool kNativeFma = false;

  /// fmaf(a, b, c) for factors that came from bf16. The product is exact in double, and the sum is
  /// rounded to odd there (the last bit set where it was inexact), so that rounding it to fp32
  /// gives what one rounding would have given.
  static float fma_of_bf16(float a, float b, float c) {
    const double x = c;
    const double y = static_cast<double>(a) * static_cast<double>(b);
    const double sum = x + y;
    const double y_seen = sum - x;
    const double error = (x - (sum - y_seen)) + (y - y_seen);
    std::uint64_t bits = __builtin_bit_cast(std::uint64_t, sum);
    const bool inexact = error < 0 || error > 0;  // false for a NaN, which inf leaves
    if (inexact && (bits & 1u) == 0) bits += (error > 0) == (sum > 0) ? 1u : ~std::uint64_t{0};
    return static_cast<float>(__builtin_bit_cast(double, bits));
  }
  static F fma(F a, F b, F c) {
    return F{fma_of_bf16(a[0], b[0], c[0]), fma_of_bf16(a[1], b[1], c[1]),
             fma_of_bf16(a[2], b[2], c[2]), fma_of_bf16(a[3], b[3], c[3])};
  }
#endif

  static void transpose(U* r) {
    const U t0 = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
    const U t1 = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
    const U t2 = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
    const U t3 = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
    r[0] = __builtin_shufflevector(t0, t1, 0, 1, 4, 5);
    r[1] = __builtin_shufflevector(t0, t1, 2, 3, 6, 7);
    r[2] = __builtin_shufflevector(t2, t3, 0, 1, 4, 5);
    r[3] = __builtin_shufflevector(t2, t3, 2, 3, 6, 7);
  }
};

}  // namespace
}  // namespace uniep::cpu

#include "cpu/kernels/gemm_impl.h"
#include "cpu/kernels/rows_impl.h"

namespace uniep::cpu {

constinit const Kernels kPortableKernels = {Isa::kPortable, "portable", gemm,    swiglu,
                                            dswiglu,        round_row,  add_row, add_f32_row};

}  // namespace uniep::cpu
