#pragma once

#include "cuda/device/sm90/gemm.cuh"
#include "cuda/device/warp.cuh"

// What biases add to the products, in the epilogue of each. What is summed over operands (dy b2,
// db1 and db2): step_sums.cuh.

namespace uniep::cuda {

/// The biases of an expert.
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

  /// Adds it to the pairs of 16 columns of a span, of which these are number `group`. By all lanes.
  __device__ __forceinline__ void add_to(int span, int group, std::uint32_t* pairs) const {
    for_each_eighth(span, group, [&](int first, std::uint32_t bias) {
      pairs[first] = add_pairs(pairs[first], bias);
      pairs[first + 1] = add_pairs(pairs[first + 1], bias);
    });
  }
  /// Adds it to the pairs, times the factors of the thread's two rows.
  __device__ __forceinline__ void add_to(int span, int group, const float (&factors)[2],
                                         std::uint32_t* pairs) const {
    for_each_eighth(span, group, [&](int first, std::uint32_t bias) {
      pairs[first] = add_pair(pairs[first], factors[0], bias);
      pairs[first + 1] = add_pair(pairs[first + 1], factors[1], bias);
    });
  }

 private:
  /// f(the first of two pairs in the same columns, the bias there)
  template <class F>
  __device__ __forceinline__ void for_each_eighth(int span, int group, F&& f) const {
#pragma unroll
    for (int i = 0; i < kMatrixPairs / 2; ++i) f(2 * i, pair_of_eighth(of_[span], 2 * group + i));
  }

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

  /// Adds the bias to the pairs of 64 columns of a part.
  __device__ __forceinline__ void add_to(const PassView& v, int part, int chunk,
                                         std::uint32_t (&pairs)[kPairs]) const {
    if (!v.choice.has_bias) return;
#pragma unroll
    for (int group = 0; group < kBoxCols / 16; ++group) {
      bias_.add_to(part * kChunks + chunk, group, pairs + kMatrixPairs * group);
    }
  }

 private:
  static constexpr int kChunks = Columns::kPart / kBoxCols;
  SpreadBias<2 * kChunks> bias_;
};

}  // namespace uniep::cuda
