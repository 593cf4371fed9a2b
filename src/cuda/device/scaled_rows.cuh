#pragma once

#include "cuda/device/vectors.cuh"
#include "cuda/device/warp.cuh"

// Copies of a token's row, each times a factor of its own: what dispatch stores of dy where
// probabilities stand behind fc2. All lanes of a warp share the vectors of a row.

namespace uniep::cuda {

__device__ __forceinline__ Vector scaled(const Vector& v, float factor) {
  const auto pair = [factor](std::uint32_t p) {
    return pack_pair(factor * low_of(p), factor * high_of(p));
  };
  return {pair(v.x), pair(v.y), pair(v.z), pair(v.w)};
}

/// Stores to the first kRows of `rows`, a bit a lane, each where its lane says; returns the others.
/// A vector is read once for all of them.
template <int kRows>
__device__ __forceinline__ unsigned store_some_scaled(const Vector* from, int vectors,
                                                      unsigned rows, unsigned long long to,
                                                      float factor, int lane) {
  Vector* row[kRows];
  float factors[kRows];
#pragma unroll
  for (int n = 0; n < kRows; ++n, rows &= rows - 1) {
    const int of = __ffs(static_cast<int>(rows)) - 1;
    row[n] = reinterpret_cast<Vector*>(__shfl_sync(kWholeWarp, to, of));
    factors[n] = __shfl_sync(kWholeWarp, factor, of);
  }
  // With fewer stores ahead, ptxas finds too few registers for the consumers of some kernels.
  constexpr int kVectorsAhead = 8 / kRows;
#pragma unroll kVectorsAhead
  for (int i = lane; i < vectors; i += 32) {
    const Vector v = from[i];
#pragma unroll
    for (int n = 0; n < kRows; ++n) row[n][i] = scaled(v, factors[n]);
  }
  return rows;
}

/// Stores `bytes` to each lane's row, from its byte `first` on, times the lane's factor; null: to
/// nowhere. `lane`: this one's number. Callers have it, and some kernels lack the registers to
/// compute it anew, or to add `first` any earlier.
__device__ __forceinline__ void store_scaled(const std::uint8_t* from, int bytes, bf16* row_of_lane,
                                             int first, float factor, int lane) {
  const auto* vectors = reinterpret_cast<const Vector*>(from);
  const auto count = bytes / static_cast<int>(sizeof(Vector));
  const auto to = reinterpret_cast<unsigned long long>(row_of_lane);
  unsigned rows = __ballot_sync(kWholeWarp, to != 0);
  while (__popc(rows) >= 4) {
    rows = store_some_scaled<4>(vectors, count, rows, to + first, factor, lane);
  }
  while (rows != 0) rows = store_some_scaled<1>(vectors, count, rows, to + first, factor, lane);
}

}  // namespace uniep::cuda
