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

  /// fmaf(a, b, c) for factors that came from bf16, by way of double. Their product has 16
  /// significant bits, so it is exact there. If the sum is exact too, it is rounded once. If it is
  /// not, then either the product is below 2^-36 of c, or c is below 2^-28 of the product (which
  /// then is an fp32 number, or overflows anyway): too little to reach the midpoint between two
  /// fp32 numbers, 2^-26 away at least, and both roundings return the larger one.
  static F fma(F a, F b, F c) {
    typedef double D __attribute__((vector_size(32)));
    const D product = __builtin_convertvector(a, D) * __builtin_convertvector(b, D);
    return __builtin_convertvector(__builtin_convertvector(c, D) + product, F);
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

constinit const Kernels kPortableKernels = {.isa = Isa::kPortable,
                                            .name = "portable",
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
