#pragma once

#include <type_traits>

#include "base/contract.h"
#include "base/row_factors.h"
#include "cuda/device/sm90/biases.cuh"
#include "cuda/device/sm90/gemm.cuh"
#include "cuda/device/warp.cuh"

// What biases sum over the left operand of a product: dy b2 over its columns, db1 and db2 over its
// rows. Senders do it, who have nothing else to do under the products: each over its consumer's 64
// rows or columns, from the steps that lie in shared memory for these (sum_steps, gemm.cuh).
//
// The partial sums of both contracts (base/contract.h) are of neighbouring pairs, every fourth pair
// one's. Matrix fragments lie likewise, transposed or not: lane 4 r + q has partial sum q of row or
// column r, and of the one 8 behind.

namespace uniep::cuda {

inline constexpr int kPartSize = kConsumerRows / kSumParts;  // rows or columns
static_assert(kPartSize == 16, "of two matrices");
inline constexpr int kSumsOfLane = 2;  // of a part
inline constexpr int kEighths = 8;     // of a step: rows or columns of a matrix

/// The parts that a tile sums: of N tiles with the same left operand, those that leave its number
/// modulo N. Not of tiles behind the first kSumParts, which have none.
class SumParts {
 public:
  template <class Shape>
  static __device__ __forceinline__ SumParts of(const PassView& v, Stage stage, int first_col) {
    const auto tiles = static_cast<int>(column_tiles(v, stage));
    unsigned parts = 0;
    for (int part = first_col / Shape::kN; part < kSumParts; part += tiles) parts |= 1u << part;
    return SumParts(parts);
  }

  /// f(part), of which the compiler knows the number: sums stay in registers.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) const {
#pragma unroll
    for (int part = 0; part < kSumParts; ++part) {
      if ((parts_ >> part & 1) != 0) f(part);
    }
  }

 private:
  explicit __device__ __forceinline__ SumParts(unsigned parts) : parts_(parts) {}
  unsigned parts_;
};

/// The offset of this lane's row of fragments within any box: box_address less the box's, so that
/// it need not be found anew for every step.
template <class Shape>
__device__ __forceinline__ std::uint32_t offset_in_box(const Sender<Shape>& sender) {
  const std::uint8_t* const box = sender.shared.slots[0].a;
  return box_address(box) - ptx::shared_address(box);
}

/// Row or column of the sender's 64 that the lane's sum `i` of a part is of.
__device__ __forceinline__ int place_of(int part, int i) {
  return kPartSize * part + kEighths * i + ptx::lane_id() / 4;
}

/// dy b2 of the sender's rows, in groups of 64 columns, a step each, in the order of dprobs
/// (Dfc2::store_groups).
template <class Shape>
class RowDots {
 public:
  __device__ __forceinline__ RowDots(const Sender<Shape>& sender, const TileWork& work)
      : parts_(SumParts::of<Shape>(sender.ctx.view, Stage::kDfc2, work.n)),
        offset_(offset_in_box(sender)),
        b2_(b2_of(sender.ctx, work.expert)) {
    read(sender.ctx, 0);
  }

  __device__ __forceinline__ void add(const Sender<Shape>& sender, const TileWork&,
                                      const std::uint8_t* box, int k) {
    static_assert(kTileK == kDprobGroup, "a step is a group");
    const std::uint32_t factors = factors_;
    read(sender.ctx, k + 1);
    const std::uint32_t first = ptx::shared_address(box) + offset_;
    parts_.for_each([&](int part) {
      float sums[kSumsOfLane] = {};
#pragma unroll
      for (int eighth = 0; eighth < kEighths; eighth += 2) {
        MatrixPairs pairs;
        load_matrices(group_address(first + part * (kBoxBytes / kSumParts), eighth / 2), pairs);
        add_products(sums, pairs, pair_of_eighth(factors, eighth));
        add_products(sums, pairs + 2, pair_of_eighth(factors, eighth + 1));
      }
#pragma unroll
      for (int i = 0; i < kSumsOfLane; ++i) {
        of_[part][i] = of_[part][i] + sum_of_four(sums[i]);
      }
    });
  }

  /// Stores the sums behind the row's groups.
  __device__ __forceinline__ void store(const Sender<Shape>& sender, const TileWork& work) const {
    const std::int64_t sums = dprob_sums(sender.ctx.view);
    parts_.for_each([&](int part) {
#pragma unroll
      for (int i = 0; i < kSumsOfLane; ++i) {
        const int row = kConsumerRows * sender.index + place_of(part, i);
        if (sender.lane % 4 != 0 || row >= work.rows) continue;
        float* of_row = sender.ctx.template get<Tensor::kDprobGroups>() +
                        (std::int64_t{work.first_row} + row) * sums;
        of_row[sums - 1] = of_[part][i];
      }
    });
  }

 private:
  /// Reads b2 in the columns of a step before it comes, two a lane.
  __device__ __forceinline__ void read(const DeviceContext& ctx, int k) {
    factors_ = pair_at(b2_, k * kTileK + 2 * ptx::lane_id(), ctx.view.hidden);
  }

  /// Products of two bf16 numbers are exact in fp32, so the fused sum has the bits of the other.
  static __device__ __forceinline__ void add_products(float (&sums)[kSumsOfLane],
                                                      const std::uint32_t* pairs,
                                                      std::uint32_t factor) {
#pragma unroll
    for (int i = 0; i < kSumsOfLane; ++i) {
      sums[i] = __fmaf_rn(low_of(pairs[i]), low_of(factor), sums[i]);
      sums[i] = __fmaf_rn(high_of(pairs[i]), high_of(factor), sums[i]);
    }
  }

  SumParts parts_;
  std::uint32_t offset_;
  const bf16* b2_;
  std::uint32_t factors_ = 0;
  float of_[kSumParts][kSumsOfLane] = {};
};

/// Factors of a step's rows: those of two neighbours a lane.
struct StepFactors {
  float of[2];
};

/// Sums over rows of 64 columns, in the order of kBiasRows (base/contract.h), of which a step is a
/// group.
class ColumnSums {
 public:
  __device__ __forceinline__ ColumnSums(SumParts parts, std::uint32_t offset)
      : parts_(parts), offset_(offset) {}

  /// Rows of the step from number `rows` on count as zeros; factor(eighth): of the lane's two rows
  /// in it, by all lanes.
  template <class Factor>
  __device__ __forceinline__ void add(const std::uint8_t* box, int rows, Factor&& factor) {
    static_assert(kTileK == kBiasRows, "a step is a group");
    const std::uint32_t first = ptx::shared_address(box) + offset_;
    parts_.for_each([&](int part) {
      MatrixPairs pairs[kEighths / 2];
#pragma unroll
      for (int i = 0; i < kEighths / 2; ++i) {
        load_transposed(group_address(first, part) + i * (kBoxBytes / kSumParts), pairs[i]);
      }
      if (rows < kBiasRows) clear_behind(rows, pairs);
      float sums[kSumsOfLane] = {};
#pragma unroll
      for (int eighth = 0; eighth < kEighths; ++eighth) {
        const StepFactors f = factor(eighth);
#pragma unroll
        for (int i = 0; i < kSumsOfLane; ++i) {
          const std::uint32_t pair = pairs[eighth / 2][2 * i + eighth % 2];
          sums[i] = sums[i] + f.of[0] * low_of(pair);
          sums[i] = sums[i] + f.of[1] * high_of(pair);
        }
      }
#pragma unroll
      for (int i = 0; i < kSumsOfLane; ++i) {
        of_[part][i] = of_[part][i] + sum_of_four(sums[i]);
      }
    });
  }

  /// f(column, its sum), every column of the parts once.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) const {
    parts_.for_each([&](int part) {
#pragma unroll
      for (int i = 0; i < kSumsOfLane; ++i) {
        if (ptx::lane_id() % 4 == 0) f(place_of(part, i), of_[part][i]);
      }
    });
  }

 private:
  /// Zeroes the rows behind the last one.
  static __device__ __forceinline__ void clear_behind(int rows,
                                                      MatrixPairs (&pairs)[kEighths / 2]) {
#pragma unroll
    for (int eighth = 0; eighth < kEighths; ++eighth) {
      const int row = bias_row(ptx::lane_id() % 4, 2 * eighth);
      const std::uint32_t mask = row + 1 < rows ? 0xffffffffu : row < rows ? 0xffffu : 0u;
#pragma unroll
      for (int i = 0; i < kSumsOfLane; ++i) pairs[eighth / 2][2 * i + eighth % 2] &= mask;
    }
  }

  SumParts parts_;
  std::uint32_t offset_;
  float of_[kSumParts][kSumsOfLane] = {};
};

/// The probabilities of a step's rows, and what db2 counts the rows times.
class StepProbs {
 public:
  /// Reads the probabilities from row `first` of the plan on.
  __device__ __forceinline__ void read(const DeviceContext& ctx, int first) {
    const float* probs = ctx.get<Tensor::kRowProbs>() + ctx.row<Tensor::kRowProbs>(first);
#pragma unroll
    for (int i = 0; i < 2; ++i) of_[i] = __ldcg(probs + 2 * ptx::lane_id() + i);
  }

  /// The factors of the first `rows` rows; behind these there are no probabilities.
  __device__ __forceinline__ StepFactors factors(const PassView& v, int rows) const {
    StepFactors factors;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factors.of[i] = 2 * ptx::lane_id() + i < rows ? factor_of_da(v.probs, of_[i]) : 0.0f;
    }
    return factors;
  }

 private:
  float of_[2] = {};
};

/// The sums of a weight gradient's tiles, in db1 or db2: `Main` as of Wgrad.
template <class Shape, Stage kWgrad, class Main>
class BiasSums {
 public:
  __device__ __forceinline__ BiasSums(const Sender<Shape>& sender, const TileWork& work)
      : sums_(SumParts::of<Shape>(sender.ctx.view, kWgrad, work.n), offset_in_box(sender)) {
    read(sender.ctx, work, 0);
  }

  __device__ __forceinline__ void add(const Sender<Shape>& sender, const TileWork& work,
                                      const std::uint8_t* box, int k) {
    const int rows = work.rows - k * kTileK;
    if (rows <= 0) return;
    if constexpr (kWeighs) {
      const StepFactors factors = probs_.factors(sender.ctx.view, rows);
      read(sender.ctx, work, k + 1);
      // Rows behind the last are zeros.
      sums_.add(box, kTileK, [&](int eighth) { return of_eighth(factors, eighth); });
    } else {
      sums_.add(box, rows, [](int) { return StepFactors{{1.0f, 1.0f}}; });
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
    sums_.for_each([&](int col, float sum) {
      const std::int64_t at = work.m + kConsumerRows * sender.index + col;
      if (at >= width) return;
      const std::int64_t element = work.expert * width + at;
      if (main == nullptr) {
        overwrite(ctx.get<kBias>() + element, sum);
      } else {
        add_to(main + element, sum);
      }
    });
  }

 private:
  static constexpr bool kWeighs = kWgrad == Stage::kWgrad2;  // rows of dy; those of dh have been

  /// Reads what a step weighs its rows by before it comes.
  __device__ __forceinline__ void read(const DeviceContext& ctx, const TileWork& work, int k) {
    if constexpr (kWeighs) {
      if (k * kTileK < work.rows) probs_.read(ctx, work.plan_row + k * kTileK);
    }
  }

  static __device__ __forceinline__ StepFactors of_eighth(const StepFactors& step, int eighth) {
    StepFactors factors;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factors.of[i] = __uint_as_float(pair_of_eighth(__float_as_uint(step.of[i]), eighth));
    }
    return factors;
  }

  static __device__ __forceinline__ void overwrite(bf16* to, float sum) {
    to->bits = static_cast<std::uint16_t>(pack_pair(sum, 0.0f));
  }
  static __device__ __forceinline__ void add_to(Main* to, float sum) {
    if constexpr (std::is_same_v<Main, bf16>) {
      overwrite(to, low_of(to->bits) + sum);
    } else {
      *to = *to + sum;
    }
  }

  ColumnSums sums_;
  [[no_unique_address]] std::conditional_t<kWeighs, StepProbs, Nothing> probs_;
};

}  // namespace uniep::cuda
