#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "uniep/bf16.h"
#include "uniep/problem.h"

namespace uniep::cpu {

/// A bf16 matrix in memory: element (i, j) is data[i * row_stride + j * col_stride]. One of the
/// strides is 1; of b in a product it may be 2, where the elements of two matrices take turns in
/// memory that ends with the last of these.
struct MatrixView {
  const bf16* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
};

/// The packing buffer of one worker. Grows on demand, keeps what it has.
class GemmScratch {
 public:
  GemmScratch() = default;
  GemmScratch(GemmScratch&& other) noexcept;
  GemmScratch& operator=(GemmScratch&&) = delete;
  ~GemmScratch();

  /// At least `count` floats, 64-byte aligned, contents undefined. Valid until the next call.
  float* reserve(std::size_t count);

 private:
  float* data_ = nullptr;
  std::size_t capacity_ = 0;
};

enum class Isa { kPortable, kAvx2, kAvx512 };

/// What an activation (base/activation.h) makes of a row. Without a gate `gate` is all of h, and
/// what has to do with `up` is null.
struct ActivationRows {
  /// One row of fc1's epilogue: h = bf16(acc), and from it a = bf16(p * f).
  void (*forward)(std::int64_t n, const float* gate_acc, const float* up_acc, float prob,
                  bf16* h_gate, bf16* h_up, bf16* a);

  /// One row of its backward, da = bf16(da_acc):
  ///   dh_g = bf16(((p * da) * value(h_u)) * slope(h_g))
  ///   dh_u = bf16(((p * da) * value(h_g)) * slope(h_u))
  ///   a as `forward` gives it
  ///   dprob_groups[g], ceil(n / kDprobGroup) of them: sums of da * f, ordered as base/contract.h
  ///   says; every lane starts from +0.
  void (*backward)(std::int64_t n, const float* da_acc, const bf16* h_gate, const bf16* h_up,
                   float prob, bf16* dh_gate, bf16* dh_up, bf16* a, float* dprob_groups);
};

/// The inner loops of one instruction set. Every instruction set gives the same bits; only which
/// NaN stands for a NaN result (sign and payload) is left open. n and the sizes may be any number
/// >= 0, pointers need only the alignment of their type, and outputs must not overlap inputs.
struct Kernels {
  Isa isa;
  const char* name;  // what UNIEP_CPU_ISA calls it

  /// See gemm_tile().
  void (*gemm)(std::int64_t m, std::int64_t n, std::int64_t k, MatrixView a, MatrixView b, float* c,
               std::int64_t ldc, GemmScratch& scratch, bool add);

  const ActivationRows* activations;  // by Activation
  const ActivationRows& of(Activation activation) const {
    return activations[static_cast<int>(activation)];
  }

  /// dst[i] = bf16(acc[i])
  void (*round_row)(std::int64_t n, const float* acc, bf16* dst);
  /// acc[i] += float(y[i])
  void (*add_row)(std::int64_t n, float* acc, const bf16* y);
  /// acc[i] += factor * y[i], both rounded
  void (*add_scaled_row)(std::int64_t n, float* acc, const bf16* y, float factor);
  /// acc[i] = float(bf16(acc[i])) + factor * bias[i]
  void (*add_bias_row)(std::int64_t n, float* acc, const bf16* bias, float factor);
  /// dst[i] = bf16(factor * x[i])
  void (*scale_row)(std::int64_t n, const bf16* x, float factor, bf16* dst);
  /// The sum of x[i] * y[i]: groups of kDprobGroup as above, then over groups ascending, from +0.
  float (*dot_row)(std::int64_t n, const bf16* x, const bf16* y);
  /// main_grad[i] += acc[i]
  void (*add_f32_row)(std::int64_t n, float* main_grad, const float* acc);
  /// main_grad[i] = bf16(float(main_grad[i]) + acc[i])
  void (*add_bf16_row)(std::int64_t n, bf16* main_grad, const float* acc);
};

/// The best that this CPU runs, or the one that the environment variable UNIEP_CPU_ISA names
/// (portable, avx2, avx512). Throws Error when that one is unknown or unsupported here.
const Kernels& kernels();

/// kernels() with the variable's value as an argument; "" for the best one.
const Kernels& select_kernels(const std::string& wanted);

/// nullptr when this CPU or this build lacks it.
const Kernels* kernels_for(Isa isa);

/// c[m x n] = a[m x k] * b[k x n]; c is row major with leading dimension ldc, and overwritten.
/// Every element is one fp32 accumulator that starts from +0 and takes k fused multiply-adds in
/// ascending order (k = 0 gives +0), whatever the tile shape, so any split of m and n gives the
/// same bits. With `add` the accumulators go on from what c holds: so does any split of k.
void gemm_tile(const Kernels& kernels, std::int64_t m, std::int64_t n, std::int64_t k, MatrixView a,
               MatrixView b, float* c, std::int64_t ldc, GemmScratch& scratch, bool add = false);

}  // namespace uniep::cpu
