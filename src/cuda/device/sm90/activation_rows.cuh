#pragma once

#include "base/row_factors.h"
#include "cuda/device/activation.cuh"
#include "cuda/device/sm90/gemm.cuh"

// What the epilogues of fc1 and dfc2, which both apply the activation, share.

namespace uniep::cuda {

/// Probabilities of the two rows of a tile of which a consumer thread holds elements: row lane / 4
/// of the warp's 16, and the row 8 below. Pair i of a fragment lies in row i % 2 of them.
struct RowProbs {
  float of[2];
};

/// What f(h) is multiplied by in either pass. Not `kGeneral`: by the probability itself.
template <bool kGeneral, Pass pass>
__device__ __forceinline__ RowProbs factors_of(const PassView& v, const RowProbs& probs) {
  RowProbs factors = probs;
  if constexpr (kGeneral) {
#pragma unroll
    for (float& p : factors.of) {
      p = pass == Pass::kForward ? factor_of_a(v.probs, p) : factor_of_da(v.probs, p);
    }
  }
  return factors;
}

/// f(h) of an element of a half of h, given what v(h) is there, and of its partner in the other
/// half; without a gate there is none.
template <Activation activation>
__device__ __forceinline__ float product_of(const ValueSlope& gate, float up, const Limits& of) {
  if constexpr (is_gated(activation)) {
    return gate.value * up_at<activation, DeviceMath>(up, of).value;
  }
  return gate.value;
}

/// What a tile's columns of h are, kN in two parts: with a gate the same columns of either half,
/// without one neighbouring columns. Not `kGeneral`: with a gate.
template <class Shape, bool kGeneral>
struct ColumnsOfH {
  static constexpr int kPart = Shape::kN / 2;
  int n;  // the tile's first
  bool gated;

  __device__ __forceinline__ ColumnsOfH(const PassView& v, const TileWork& work)
      : n(work.n), gated(!kGeneral || is_gated(v.activation)) {}

  __device__ __forceinline__ int half(int part) const { return gated ? part : 0; }
  /// The first column of the part in that half.
  __device__ __forceinline__ int first(int part) const {
    return gated || part == 0 ? n : n + kPart;
  }
};

/// Element i of a few registers, of a loop that is not unrolled; ...
template <class T, int kCount>
__device__ __forceinline__ T pick(const T (&values)[kCount], int i) {
  T picked = values[0];
#pragma unroll
  for (int j = 1; j < kCount; ++j) picked = j == i ? values[j] : picked;
  return picked;
}

/// ... and `value` to there.
template <class T, int kCount>
__device__ __forceinline__ void put(T (&values)[kCount], int i, T value) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = j == i ? value : values[j];
}

/// The sigmoids that pairs of gates take, side by side.
template <Activation activation, bool kUsual, int kCount>
__device__ __forceinline__ void sigmoids_of(const std::uint32_t (&gates)[kCount], const Limits& of,
                                            float (&s)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s[2 * i] = sigmoid_argument<activation>(low_of(gates[i]), of);
    s[2 * i + 1] = sigmoid_argument<activation>(high_of(gates[i]), of);
  }
  sigmoids<kUsual>(s);
}

/// Whether any of the thread's gates needs the slow path of the sigmoid.
template <Activation activation, int kCount>
__device__ __forceinline__ bool has_unusual_gate(const std::uint32_t (&gates)[kCount]) {
  std::uint32_t most = gates[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) most = max_magnitude_pair(most, gates[i]);
  return is_unusual_gate<activation>(low_of(most)) || is_unusual_gate<activation>(high_of(most));
}

}  // namespace uniep::cuda
