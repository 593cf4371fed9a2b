#pragma once

#include <type_traits>

#include "base/contract.h"
#include "base/row_factors.h"
#include "cuda/device/sm90/biases.cuh"
#include "cuda/device/sm90/gemm.cuh"
#include "cuda/device/warp.cuh"

// What biases sum over the left operand of a product: dy b2 over its columns, db1 and db2 over its
// rows. Senders do it, who have nothing else to do under the products, in the tiles of the first
// columns: each over its consumer's 64 rows or columns, from the steps that lie in shared memory
// for these (sum_steps, gemm.cuh).

namespace uniep::cuda {

/// Elements [8 chunk, 8 chunk + 8) of row `row` of rows of 64 elements that lie as the copy engine
/// left them: rows of 128 bytes, whose chunks of 16 bytes are swizzled.
__device__ __forceinline__ Vector swizzled_vector(const std::uint8_t* box, int row, int chunk) {
  return *reinterpret_cast<const Vector*>(box + row * 128 + ((chunk ^ row % 8) << 4));
}

/// dy b2 of the sender's rows, lane and lane + 32 of which are this lane's: by groups of 64
/// columns, a step each, in the order of dprobs (Dfc2::store_groups).
template <class Shape>
class RowDots {
 public:
  __device__ __forceinline__ RowDots(const Sender<Shape>& sender, const TileWork& work) {
    read(sender.ctx, work, 0);
  }

  __device__ __forceinline__ void add(const Sender<Shape>& sender, const TileWork& work,
                                      const std::uint8_t* box, int k) {
    static_assert(kTileK == kDprobGroup, "a step is a group");
    const std::uint32_t factors = factors_;
    read(sender.ctx, work, k + 1);
    float sums[kRows][kPartials] = {};
#pragma unroll 2
    for (int chunk = 0; chunk < kTileK / kVectorElements; ++chunk) {
      std::uint32_t pairs[kRows][kPartials];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const Vector of_row = swizzled_vector(box, 32 * row + sender.lane, chunk);
        pairs[row][0] = of_row.x;
        pairs[row][1] = of_row.y;
        pairs[row][2] = of_row.z;
        pairs[row][3] = of_row.w;
      }
#pragma unroll
      for (int i = 0; i < kPartials; ++i) {
        const std::uint32_t factor = __shfl_sync(kWholeWarp, factors, kPartials * chunk + i);
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          float& sum = sums[row][i];
          sum = sum + low_of(pairs[row][i]) * low_of(factor);
          sum = sum + high_of(pairs[row][i]) * high_of(factor);
        }
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float(&s)[kPartials] = sums[row];
      of_[row] = of_[row] + ((s[0] + s[1]) + (s[2] + s[3]));
    }
  }

  /// Behind the row's groups.
  __device__ __forceinline__ void store(const Sender<Shape>& sender, const TileWork& work) const {
    const std::int64_t sums = dprob_sums(sender.ctx.view);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = kConsumerRows * sender.index + 32 * i + sender.lane;
      if (row >= work.rows) continue;
      float* of_row = sender.ctx.template get<Tensor::kDprobGroups>() +
                      (std::int64_t{work.first_row} + row) * sums;
      of_row[sums - 1] = of_[i];
    }
  }

 private:
  static constexpr int kRows = kConsumerRows / 32;
  static constexpr int kPartials = 4;  // of neighbouring pairs of columns

  /// Ahead of the step: b2 in its columns, two a lane.
  __device__ __forceinline__ void read(const DeviceContext& ctx, const TileWork& work, int k) {
    factors_ = pair_at(b2_of(ctx, work.expert), std::int64_t{k} * kTileK + 2 * ptx::lane_id(),
                       ctx.view.hidden);
  }

  std::uint32_t factors_ = 0;
  float of_[kRows] = {};
};

/// Sums over rows of 64 columns, 8 of which are the lane's, in one of four partial sums: in the
/// order of kBiasRows (base/contract.h), of which a step is a group.
class ColumnSums {
 public:
  /// `rows` are those of the step that exist; factor(row of the step), by all lanes, of each.
  template <class Factor>
  __device__ __forceinline__ void add(const std::uint8_t* box, int rows, Factor&& factor) {
    static_assert(kTileK == kBiasRows, "a step is a group");
    constexpr int kRows = kBiasRows / kBiasPartials;
    constexpr int kAtOnce = kRows / 2;
    const int partial = ptx::lane_id() / kChunks;
    float sums[kVectorElements] = {};
#pragma unroll 1
    for (int first = 0; first < kRows; first += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = bias_row(0, first) + bias_row(partial, i);
        const Vector elements = swizzled_vector(box, row, ptx::lane_id() % kChunks);
        const float f = factor(row);
        if (row < rows) add_vector(sums, elements, f);
      }
    }
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) {
      sums[i] = sums[i] + __shfl_xor_sync(kWholeWarp, sums[i], kChunks);
      sums[i] = sums[i] + __shfl_xor_sync(kWholeWarp, sums[i], 2 * kChunks);
      of_[i] = of_[i] + sums[i];
    }
  }

  /// f(column, its sum and the next one's), every column once.
  template <class F>
  __device__ __forceinline__ void for_each_pair(F&& f) const {
    const int lane = ptx::lane_id();
#pragma unroll
    for (int i = 0; i < kBiasPartials; ++i) {
      const int col = kVectorElements * (lane % kChunks) + 2 * i;
      if (lane / kChunks == i) f(col, of_[2 * i], of_[2 * i + 1]);
    }
  }

 private:
  static constexpr int kChunks = kBoxCols / kVectorElements;  // of a row
  static_assert(kChunks * kBiasPartials == 32 && 2 * kBiasPartials == kVectorElements);
  float of_[kVectorElements] = {};
};

/// The probabilities of a step's rows, two a lane, and what db2 counts the rows times.
class StepProbs {
 public:
  /// From row `first` of the plan on.
  __device__ __forceinline__ void read(const DeviceContext& ctx, int first) {
    const float* probs = ctx.get<Tensor::kRowProbs>() + ctx.row<Tensor::kRowProbs>(first);
#pragma unroll
    for (int i = 0; i < 2; ++i) of_[i] = __ldcg(probs + 32 * i + ptx::lane_id());
  }

  /// By all lanes, of rows of the same half.
  __device__ __forceinline__ float factor(const PassView& v, int row) const {
    const float mine = row < 32 ? of_[0] : of_[1];
    return factor_of_da(v.probs, __shfl_sync(kWholeWarp, mine, row % 32));
  }

 private:
  float of_[2] = {};
};

/// The sums of a weight gradient's tiles, in db1 or db2: `Main` as of Wgrad.
template <class Shape, Stage kWgrad, class Main>
class BiasSums {
 public:
  __device__ __forceinline__ BiasSums(const Sender<Shape>& sender, const TileWork& work) {
    read(sender.ctx, work, 0);
  }

  __device__ __forceinline__ void add(const Sender<Shape>& sender, const TileWork& work,
                                      const std::uint8_t* box, int k) {
    const int rows = work.rows - k * kTileK;
    if (rows <= 0) return;
    if constexpr (kWeighs) {
      const StepProbs probs = probs_;
      read(sender.ctx, work, k + 1);
      sums_.add(box, rows, [&](int row) { return probs.factor(sender.ctx.view, row); });
    } else {
      sums_.add(box, rows, [](int) { return 1.0f; });
    }
  }

  /// A main gradient of an expert without rows keeps what it holds.
  __device__ __forceinline__ void store(const Sender<Shape>& sender, const TileWork& work) const {
    constexpr bool kFirst = kWgrad == Stage::kWgrad1;
    constexpr Tensor kBias = kFirst ? Tensor::kDb1 : Tensor::kDb2;
    const DeviceContext& ctx = sender.ctx;
    const std::int64_t width = kFirst ? ctx.view.h_width() : ctx.view.hidden;
    auto* const main = static_cast<Main*>(kFirst ? ctx.main_db1 : ctx.main_db2);
    if (main != nullptr && work.rows == 0) return;
    sums_.for_each_pair([&](int col, float sum, float next) {
      const std::int64_t at = work.m + kConsumerRows * sender.index + col;
      if (at >= width) return;
      const std::int64_t pair = work.expert * width + at;
      if (main == nullptr) {
        overwrite(ctx.get<kBias>() + pair, sum, next);
      } else {
        add_to(main + pair, sum, next);
      }
    });
  }

 private:
  static constexpr bool kWeighs = kWgrad == Stage::kWgrad2;  // rows of dy; those of dh have been

  /// Ahead of the step.
  __device__ __forceinline__ void read(const DeviceContext& ctx, const TileWork& work, int k) {
    if constexpr (kWeighs) {
      if (k * kTileK < work.rows) probs_.read(ctx, work.plan_row + k * kTileK);
    }
  }

  static __device__ __forceinline__ void overwrite(bf16* to, float sum, float next) {
    *reinterpret_cast<std::uint32_t*>(to) = pack_pair(sum, next);
  }
  static __device__ __forceinline__ void add_to(Main* to, float sum, float next) {
    if constexpr (std::is_same_v<Main, bf16>) {
      const auto pair = *reinterpret_cast<const std::uint32_t*>(to);
      overwrite(to, low_of(pair) + sum, high_of(pair) + next);
    } else {
      to[0] = to[0] + sum;
      to[1] = to[1] + next;
    }
  }

  ColumnSums sums_;
  [[no_unique_address]] std::conditional_t<kWeighs, StepProbs, Nothing> probs_;
};

}  // namespace uniep::cuda
