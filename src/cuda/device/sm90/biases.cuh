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

/// A bias in the columns of a tile, `kSpans` times 64 of them: read ahead of the main loop, and so
/// spread over a warp, two columns a lane. Without biases, anything.
template <int kSpans>
class SpreadBias {
 public:
  /// Columns [col, col + 64) of a row of `width` are the span's.
  __device__ __forceinline__ void read(int span, const bf16* row, std::int64_t col,
                                       std::int64_t width) {
    of_[span] = pair_at(row, col + 2 * ptx::lane_id(), width);
  }

  /// Adds it, times the factors of the thread's two rows, to the pairs of 16 columns of a span, of
  /// which these are number `group`. By all lanes.
  __device__ __forceinline__ void add_to(int span, int group, const float (&factors)[2],
                                         std::uint32_t* pairs) const {
    std::uint32_t bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int lane = 4 * (2 * group + i) + ptx::lane_id() % 4;
      bias[i] = __shfl_sync(kWholeWarp, of_[span], lane);
    }
#pragma unroll
    for (int i = 0; i < kMatrixPairs; ++i) {
      pairs[i] = add_pair(pairs[i], factors[i % 2], bias[i / 2]);
    }
  }

 private:
  std::uint32_t of_[kSpans];
};

/// b1 in both parts of the columns of a tile of h.
template <class Columns>
class BiasOfH {
 public:
  __device__ __forceinline__ BiasOfH(const DeviceContext& ctx, const TileWork& work) {
    if (!ctx.view.choice.has_bias) return;
    const Columns columns(ctx.view, work);
    const std::int64_t width = ctx.view.intermediate;
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) {
      const int part = i / kChunks;
      bias_.read(i, b1_of(ctx, work.expert) + columns.half(part) * width,
                 columns.first(part) + i % kChunks * kBoxCols, width);
    }
  }

  /// To the pairs of 64 columns of a part.
  __device__ __forceinline__ void add_to(const PassView& v, int part, int chunk,
                                         std::uint32_t (&pairs)[kPairs]) const {
    if (!v.choice.has_bias) return;
    constexpr float kOnes[2] = {1.0f, 1.0f};
#pragma unroll
    for (int group = 0; group < kBoxCols / 16; ++group) {
      bias_.add_to(part * kChunks + chunk, group, kOnes, pairs + kMatrixPairs * group);
    }
  }

 private:
  static constexpr int kChunks = Columns::kPart / kBoxCols;
  SpreadBias<2 * kChunks> bias_;
};

/// Element `col` of row `row`, and the next, of rows of 64 elements that lie as the copy engine
/// left them: rows of 128 bytes, whose chunks of 16 bytes are swizzled.
__device__ __forceinline__ std::uint32_t swizzled_pair(const std::uint8_t* box, int row, int col) {
  const int chunk = (col / kVectorElements) ^ row % 8;
  return *reinterpret_cast<const std::uint32_t*>(box + row * 128 + chunk * 16 +
                                                 col % kVectorElements * kBf16Bytes);
}

// What is read beside the products has few registers, so loops are rolled.

/// The sums over columns of the thread's two rows, as in RowProbs, times a row of weights: by
/// groups of 64 columns, a step each, in the order of dprobs (Dfc2::store_groups).
template <class Shape>
class RowDots {
 public:
  /// `factors` [H] are those of all columns.
  __device__ __forceinline__ void add(const Consumer<Shape>& consumer,
                                      const OperandSlot<Shape>& operands, const bf16* factors,
                                      int k_block) {
    static_assert(kTileK == kDprobGroup, "a step is a group");
    const std::uint32_t of_step =  // two columns a lane
        pair_at(factors, std::int64_t{k_block} * kTileK + 2 * consumer.lane(),
                consumer.ctx.view.hidden);
    const int row = consumer.lane() / 4, pair = consumer.lane() % 4;
    const std::uint8_t* box = operands.a + consumer.first_row() * kRowBytes;
    float sums[2] = {0, 0};
#pragma unroll 1
    for (int i = 0; i < kTileK / kVectorElements; ++i) {
      const std::uint32_t factor = __shfl_sync(kWholeWarp, of_step, 4 * i + pair);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t elements =
            swizzled_pair(box + half * 8 * kRowBytes, row, i * kVectorElements + 2 * pair);
        sums[half] = sums[half] + low_of(elements) * low_of(factor);
        sums[half] = sums[half] + high_of(elements) * high_of(factor);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[half] += __shfl_xor_sync(kWholeWarp, sums[half], 1);
      sums[half] += __shfl_xor_sync(kWholeWarp, sums[half], 2);
      of_[half] = of_[half] + sums[half];
    }
  }

  __device__ __forceinline__ float of(int half) const { return of_[half]; }

 private:
  static constexpr int kRowBytes = kTileK * kOperandBytes;
  float of_[2] = {0, 0};
};

/// The sums over rows of a consumer's 64 columns of a weight gradient's left operand, each row
/// times a factor: in the order of kBiasRows (base/contract.h), of which a step is a group. A warp
/// sums 16 columns, a thread two of them in one of four partial sums.
template <class Shape>
struct ColumnSums {
  float of[2] = {0, 0};

  /// The thread's first column, of the consumer's.
  static __device__ __forceinline__ int column(const Consumer<Shape>& consumer) {
    return 16 * consumer.warp() + 2 * (consumer.lane() / kBiasPartials);
  }
  static __device__ __forceinline__ bool stores(const Consumer<Shape>& consumer) {
    return consumer.lane() % kBiasPartials == 0;
  }

  /// `rows` are those of the step that exist; factor(row of the step) of each.
  template <class Factor>
  __device__ __forceinline__ void add(const Consumer<Shape>& consumer,
                                      const OperandSlot<Shape>& operands, int rows,
                                      Factor&& factor) {
    static_assert(kTileK == kBiasRows, "a step is a group");
    constexpr int kRows = kBiasRows / kBiasPartials;
    const std::uint8_t* box = operands.a + consumer.index * kBoxBytes;
    const int partial = consumer.lane() % kBiasPartials;
    float sums[2] = {0, 0};
    std::uint32_t next = swizzled_pair(box, bias_row(partial, 0), column(consumer));
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) {
      const int row = bias_row(partial, i);
      const std::uint32_t pair = next;
      next = swizzled_pair(box, bias_row(partial, (i + 1) % kRows), column(consumer));
      const float f = factor(row);
      if (row < rows) {
        sums[0] = sums[0] + f * low_of(pair);
        sums[1] = sums[1] + f * high_of(pair);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] = sums[i] + __shfl_xor_sync(kWholeWarp, sums[i], 1);
      sums[i] = sums[i] + __shfl_xor_sync(kWholeWarp, sums[i], 2);
      of[i] = of[i] + sums[i];
    }
  }
};

/// What db2 counts the rows of a step times, from row `first` of the plan on: read by a warp for
/// all of its lanes, before the products of the step.
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
    const float low = __shfl_sync(kWholeWarp, of_[0], row % 32);
    const float high = __shfl_sync(kWholeWarp, of_[1], row % 32);
    return row < 32 ? low : high;
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
