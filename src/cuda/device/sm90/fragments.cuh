#pragma once

#include <cstdint>

#include "cuda/device/sm90/tiles.cuh"
#include "cuda/device/vectors.cuh"

// Accumulators of a warp as matrix fragments. A warp of a consumer warpgroup holds 16 rows; in 64
// columns that is 16 pairs of neighbouring columns per thread. Pair i of a thread lies in row
// lane / 4 + 8 (i % 2) and columns 8 (i / 2) + 2 (lane % 4) and the next.

namespace uniep::cuda {

inline constexpr int kPairs = 16;

/// The greater magnitude of each half, of whichever sign; a NaN where there is one.
__device__ __forceinline__ std::uint32_t max_magnitude_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t most;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

/// The address of this lane's row of matrix fragments of the first 16 columns, in a swizzled box of
/// 16 rows by 64 columns that begins at a multiple of 1024 bytes.
__device__ __forceinline__ std::uint32_t box_address(const std::uint8_t* box) {
  const int lane = ptx::lane_id();
  const int row = lane % 16;
  const int chunk = lane / 16;
  return ptx::shared_address(box) +
         static_cast<std::uint32_t>(row * 128 + ((chunk ^ row % 8) << 4));
}
/// The address of this lane's row in the 16 columns `group`; `first` is that in the first 16.
__device__ __forceinline__ std::uint32_t group_address(std::uint32_t first, int group) {
  return first ^ (static_cast<std::uint32_t>(group) << 5);
}

/// Pairs of a thread in 16 columns.
inline constexpr int kMatrixPairs = 4;
using MatrixPairs = std::uint32_t[kMatrixPairs];

__device__ __forceinline__ void store_matrices(std::uint32_t address, const std::uint32_t* pairs) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

/// Writes 16 rows by 64 columns of this warp to its part of a swizzled box.
__device__ __forceinline__ void store_box(std::uint8_t* box, const std::uint32_t (&pairs)[kPairs]) {
  const std::uint32_t first = box_address(box);
#pragma unroll
  for (int group = 0; group < 4; ++group)
    store_matrices(group_address(first, group), pairs + 4 * group);
}

/// Reads 16 rows by 16 columns.
__device__ __forceinline__ void load_matrices(std::uint32_t address, MatrixPairs& pairs) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(address)
               : "memory");
}

/// Reads 16 rows by 16 columns, each matrix of 8 x 8 transposed: pair i of a thread then lies in
/// column lane / 4 + 8 (i / 2) and rows 8 (i % 2) + 2 (lane % 4) and the next.
__device__ __forceinline__ void load_transposed(std::uint32_t address, MatrixPairs& pairs) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(address)
               : "memory");
}

// Boxes of transposed fragments: a row for each column of a consumer's 64 rows, which all four of
// its warps write to, 16 elements of each row `warp`'s.

/// The address of this lane's row of transposed matrix fragments of the first 16 columns, in a
/// swizzled box of bf16. Those of the next 16 columns follow kTransposedGroupBytes behind.
__device__ __forceinline__ std::uint32_t transposed_address(const std::uint8_t* box, int warp) {
  const int lane = ptx::lane_id();
  const int row = lane / 16 * 8 + lane % 8;
  const int chunk = 2 * warp + lane / 8 % 2;
  return ptx::shared_address(box) +
         static_cast<std::uint32_t>(row * 128 + ((chunk ^ row % 8) << 4));
}
inline constexpr std::uint32_t kTransposedGroupBytes = 16 * 128;

/// Writes 16 rows by 16 columns as 16 rows of 16 columns' elements.
__device__ __forceinline__ void store_transposed(std::uint32_t address,
                                                 const std::uint32_t* pairs) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
      : "memory");
}

/// Writes 16 rows by 64 columns of this warp, transposed.
__device__ __forceinline__ void store_box_transposed(std::uint8_t* box, int warp,
                                                     const std::uint32_t (&pairs)[kPairs]) {
  const std::uint32_t first = transposed_address(box, warp);
#pragma unroll
  for (int group = 0; group < 4; ++group)
    store_transposed(first + group * kTransposedGroupBytes, pairs + 4 * group);
}

/// This thread's pair in the matrix of numbers [8 eighth, 8 eighth + 8), of 64 numbers that lie two
/// a lane: it comes from lane 4 eighth + lane % 4. By all lanes. That lane takes no register if the
/// compiler knows `eighth`: the bounds keep the last two bits.
__device__ __forceinline__ std::uint32_t pair_of_eighth(std::uint32_t mine, int eighth) {
  constexpr int kBounds = 0x3 << 8 | 0x1f;
  std::uint32_t pair;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, %3, 0xffffffff;"
               : "=r"(pair)
               : "r"(mine), "r"(4 * eighth), "n"(kBounds));
  return pair;
}

/// The sum of what the four lanes of a row of fragments hold: (0 + 1) + (2 + 3), in each of them.
__device__ __forceinline__ float sum_of_four(float mine) {
  mine = mine + __shfl_xor_sync(0xffffffffu, mine, 1);
  return mine + __shfl_xor_sync(0xffffffffu, mine, 2);
}

/// The address of this lane's first pair in a swizzled box of 16 rows by 32 columns of floats.
/// Those of 8 columns each follow as groups do (group_address); the pair 8 rows below, 1024 bytes
/// behind.
__device__ __forceinline__ std::uint32_t float_box_address(const std::uint8_t* box) {
  const int lane = ptx::lane_id();
  const int row = lane / 4;
  const int chunk = lane % 4 / 2;
  return ptx::shared_address(box) +
         static_cast<std::uint32_t>(row * 128 + ((chunk ^ row) << 4) + lane % 2 * 8);
}

/// Adds this lane's sums of 16 rows by 16 columns to the bf16 numbers that lie there, `kTransposed`
/// or not, and rounds.
template <bool kTransposed>
__device__ __forceinline__ void add_to_matrices(std::uint32_t address, const float* sums) {
  MatrixPairs pairs;
  if constexpr (kTransposed) {
    load_transposed(address, pairs);
  } else {
    load_matrices(address, pairs);
  }
#pragma unroll
  for (int i = 0; i < kMatrixPairs; ++i) {
    pairs[i] = pack_pair(low_of(pairs[i]) + sums[2 * i], high_of(pairs[i]) + sums[2 * i + 1]);
  }
  if constexpr (kTransposed) {
    store_transposed(address, pairs);
  } else {
    store_matrices(address, pairs);
  }
}

/// Adds this lane's sums of 16 rows by 8 columns to the floats of a transposed box of 32 rows'
/// elements by 64 columns, whose rows of these columns begin at `columns`. `half`: which 16 of the
/// rows. Sum 2 h + c is of row lane / 4 + 8 h and column 2 (lane % 4) + c.
__device__ __forceinline__ void add_to_transposed_floats(const std::uint8_t* columns, int half,
                                                         const float* sums) {
  const int lane = ptx::lane_id();
  const int row = lane / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = 2 * (lane % 4) + i % 2;
    const int chunk = 4 * half + 2 * (i / 2) + row / 4;
    const std::uint32_t at =
        ptx::shared_address(columns) +
        static_cast<std::uint32_t>(column * 128 + ((chunk ^ column) << 4) + row % 4 * 4);
    float sum;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(sum) : "r"(at) : "memory");
    sum = sum + sums[i];
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(sum) : "memory");
  }
}

/// Adds two pairs, of a row and the one 8 below, to the floats that lie there.
__device__ __forceinline__ void add_to_float_pairs(std::uint32_t address, const float* pairs) {
  float sums[4];
  asm volatile(
      "ld.shared.v2.f32 {%0, %1}, [%4];\n\t"
      "ld.shared.v2.f32 {%2, %3}, [%4 + 1024];"
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
      : "r"(address)
      : "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = sums[i] + pairs[i];
  asm volatile(
      "st.shared.v2.f32 [%0], {%1, %2};\n\t"
      "st.shared.v2.f32 [%0 + 1024], {%3, %4};" ::"r"(address),
      "f"(sums[0]), "f"(sums[1]), "f"(sums[2]), "f"(sums[3])
      : "memory");
}

}  // namespace uniep::cuda
