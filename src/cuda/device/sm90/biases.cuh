#pragma once

#include <type_traits>

#include "base/row_factors.h"
#include "cuda/device/sm90/gemm.cuh"
#include "cuda/device/warp.cuh"

// What biases add to the products. A bias is added in the epilogue of its product; what is summed
// over an operand (dy b2, db1 and db2) a tile of the first columns sums beside its products, from
// the steps of the operand that lie in shared memory for these.

namespace uniep::cuda {

/// Of an expert.
__device__ __forceinline__ const bf16* b1_of(const DeviceContext& ctx, int expert) {
  return ctx.get<Tensor::kB1>() + expert * ctx.view.h_width();
}
__device__ __forceinline__ const bf16* b2_of(const DeviceContext& ctx, int expert) {
  return ctx.get<Tensor::kB2>() + expert * ctx.view.hidden;
}

/// Numbers that the dprob of a row is the sum of. Not `kGeneral`: without biases.
template <bool kGeneral>
__device__ __forceinline__ std::int64_t sums_of_row(const PassView& v) {
  return kGeneral ? dprob_sums(v) : dprob_groups(v.intermediate);
}

/// Elements `col` and `col` + 1 of a row of `width`, an even number; zeros past its end.
__device__ __forceinline__ std::uint32_t pair_at(const bf16* row, std::int64_t col,
                                                 std::int64_t width) {
  return col < width ? __ldg(reinterpret_cast<const std::uint32_t*>(row + col)) : 0u;
}
__device__ __forceinline__ std::uint32_t add_pair(std::uint32_t pair, float factor,
                                                  std::uint32_t bias) {
  return pack_pair(low_of(pair) + factor * low_of(bias), high_of(pair) + factor * high_of(bias));
}

/// Adds b1 to the pairs of 64 columns of a half of h, from column `col` on.
template <class Shape>
__device__ __forceinline__ void add_b1(const Consumer<Shape>& consumer, const TileWork& work,
                                       int half, int col, std::uint32_t (&pairs)[kPairs]) {
  const PassView& v = consumer.ctx.view;
  if (!v.dropped.has_bias) return;
  const bf16* b1 = b1_of(consumer.ctx, work.expert) + half * v.intermediate;
  std::uint32_t bias[kPairs / 2];
#pragma unroll
  for (int i = 0; i < kPairs / 2; ++i) {
    bias[i] = pair_at(b1, col + 8 * i + 2 * (consumer.lane() % 4), v.intermediate);
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) pairs[i] = add_pair(pairs[i], 1.0f, bias[i / 2]);
}

/// Element `col` of row `row`, and the next, of rows of 64 elements that lie as the copy engine
/// left them: rows of 128 bytes, whose chunks of 16 bytes are swizzled.
__device__ __forceinline__ std::uint32_t swizzled_pair(const std::uint8_t* box, int row, int col) {
  const int chunk = (col / kVectorElements) ^ row % 8;
  return *reinterpret_cast<const std::uint32_t*>(box + row * 128 + chunk * 16 +
                                                 col % kVectorElements * kBf16Bytes);
}

/// The sums over columns of the thread's two rows, as in RowProbs, times a row of weights: by
/// groups of 64 columns, a step each, in the order of dprobs (Dfc2::store_groups).
template <class Shape>
struct RowDots {
  float of[2] = {0, 0};

  /// `factors` [H] are those of all columns.
  __device__ __forceinline__ void add(const Consumer<Shape>& consumer,
                                      const OperandSlot<Shape>& operands, const bf16* factors,
                                      int k_block) {
    static_assert(kTileK == kDprobGroup, "a step is a group");
    constexpr int kVectors = kTileK / kVectorElements;
    const int of_vector = 2 * (consumer.lane() % 4);  // which elements of 8 are the thread's
    std::uint32_t factor[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int col = i * kVectorElements + of_vector;
      factor[i] = pair_at(factors, std::int64_t{k_block} * kTileK + col, consumer.ctx.view.hidden);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = consumer.first_row() + consumer.lane() / 4 + 8 * half;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const std::uint32_t pair = swizzled_pair(operands.a, row, i * kVectorElements + of_vector);
        sum = sum + low_of(pair) * low_of(factor[i]);
        sum = sum + high_of(pair) * high_of(factor[i]);
      }
      sum += __shfl_xor_sync(kWholeWarp, sum, 1);
      sum += __shfl_xor_sync(kWholeWarp, sum, 2);
      of[half] = of[half] + sum;
    }
  }
};

/// The sums over rows of a consumer's 64 columns of a weight gradient's left operand, each row
/// times a factor: in canonical order, from +0. One warp does, two columns a lane.
template <class Shape>
struct ColumnSums {
  float of[2] = {0, 0};

  /// Each consumer's is on a scheduler of its own.
  static __device__ __forceinline__ bool sums(const Consumer<Shape>& consumer) {
    return consumer.warp() == 2 * consumer.index;
  }
  static __device__ __forceinline__ int column() { return 2 * ptx::lane_id(); }

  /// `rows` are those of the step that exist; factor(row of the step) of each.
  template <class Factor>
  __device__ __forceinline__ void add(const Consumer<Shape>& consumer,
                                      const OperandSlot<Shape>& operands, int rows,
                                      Factor&& factor) {
    const std::uint8_t* box = operands.a + consumer.index * kBoxBytes;
#pragma unroll 8
    for (int row = 0; row < min_of(rows, kTileK); ++row) {
      const std::uint32_t pair = swizzled_pair(box, row, column());
      const float f = factor(row);
      of[0] = of[0] + f * low_of(pair);
      of[1] = of[1] + f * high_of(pair);
    }
  }
};

/// What db2 counts the rows of a step times, from row `first` of the plan on: read by a warp for
/// all of its lanes.
class StepFactors {
 public:
  __device__ __forceinline__ StepFactors(const DeviceContext& ctx, int first) {
    const float* probs = ctx.get<Tensor::kRowProbs>() + ctx.row<Tensor::kRowProbs>(first);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      of_[i] = factor_of_da(ctx.view.probs, __ldcg(probs + 32 * i + ptx::lane_id()));
    }
  }
  __device__ __forceinline__ float operator()(int row) const {
    return __shfl_sync(kWholeWarp, row < 32 ? of_[0] : of_[1], row % 32);
  }

 private:
  float of_[2];
};

/// Writes the sums to columns [col, col + 2) of db, or adds them.
template <class Main>
__device__ __forceinline__ void store_sums(bf16* overwritten, Main* main, std::int64_t col,
                                           const float (&sums)[2]) {
  if (main == nullptr) {
    reinterpret_cast<std::uint32_t*>(overwritten)[col / 2] = pack_pair(sums[0], sums[1]);
    return;
  }
  if constexpr (std::is_same_v<Main, bf16>) {
    auto* pair = reinterpret_cast<std::uint32_t*>(main) + col / 2;
    *pair = pack_pair(low_of(*pair) + sums[0], high_of(*pair) + sums[1]);
  } else {
    main[col] = main[col] + sums[0];
    main[col + 1] = main[col + 1] + sums[1];
  }
}

}  // namespace uniep::cuda
