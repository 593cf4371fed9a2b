#pragma once

#include "cuda/device/sm90/activation_rows.cuh"
#include "cuda/device/sm90/biases.cuh"
#include "cuda/device/sm90/combine.cuh"

// fc2, the GEMM with w2, with the push. Its data gradient is in dfc2.cuh.

namespace uniep::cuda {

/// y = a w2^T, pushed. kGeneral: as of Fc1.
/// Maps: a = a (I, rows); b = w2 (I, H, El), box 64 x kN.
template <class Shape, bool kGeneral = false>
struct Fc2 : RowPush<Shape> {
  static constexpr Stage kStage = Stage::kFc2;
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kK;

  static __device__ __forceinline__ void load(const DeviceContext&, const StageMaps& maps,
                                              OperandSlot<Shape>& slot, std::uint64_t* full,
                                              const TileWork& work, int k_block) {
    const int k = k_block * kTileK;
    load_rows(maps, slot, full, work, work.first_row, k);
    ptx::tma_load(slot.b, maps.b, full, k, work.n, work.expert);
  }

  /// What b2 is multiplied by in a thread's two rows, as in RowProbs. fc1 has kept probabilities.
  static __device__ __forceinline__ RowProbs prepare(const Consumer<Shape>& consumer,
                                                     const TileWork& work) requires(kGeneral) {
    const DeviceContext& ctx = consumer.ctx;
    if (!ctx.view.dropped.has_bias) return {};
    const float* probs =
        ctx.get<Tensor::kRowProbs>() + work.saved_row + consumer.first_row() + consumer.lane() / 4;
    return factors_of<true, Pass::kForward>(ctx.view, {{__ldcg(probs), __ldcg(probs + 8)}});
  }
  static __device__ __forceinline__ Nothing prepare(const Consumer<Shape>&,
                                                    const TileWork&) requires(!kGeneral) {
    return {};
  }

  using RowPush<Shape>::finish;
  static __device__ __forceinline__ void finish(Consumer<Shape>& consumer,
                                                const float (&acc)[Shape::kAccumulators],
                                                const TileWork& work, const RowProbs& factors) {
    RowPush<Shape>::write_rows(consumer, acc, [&](int part) {
      return PartOfB2(consumer.ctx, work, work.n + part * kPushCols, factors);
    });
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps&,
                                              const TileWork& work) {
    push_rows<kStage>(sender, rows_to_push(sender, work), work);
  }

 private:
  /// b2 in the columns of a part, of which `col` is the first, and what it is multiplied by.
  class PartOfB2 {
   public:
    __device__ __forceinline__ PartOfB2(const DeviceContext& ctx, const TileWork& work, int col,
                                        const RowProbs& factors)
        : factors_(factors), exists_(ctx.view.dropped.has_bias) {
      if (!exists_) return;
#pragma unroll
      for (int i = 0; i < kPairsOfPart; ++i) {
        b2_[i] = pair_at(b2_of(ctx, work.expert), col + 8 * i + 2 * (ptx::lane_id() % 4),
                         ctx.view.hidden);
      }
    }
    /// Adds it to the pairs of 16 columns.
    __device__ __forceinline__ void operator()(int group, MatrixPairs& pairs) const {
      if (!exists_) return;
#pragma unroll
      for (int q = 0; q < kMatrixPairs; ++q) {
        pairs[q] = add_pair(pairs[q], factors_.of[q % 2], b2_[2 * group + q / 2]);
      }
    }

   private:
    static constexpr int kPairsOfPart = kPushCols / 8;
    const RowProbs& factors_;
    const bool exists_;
    std::uint32_t b2_[kPairsOfPart]{};
  };
};

}  // namespace uniep::cuda
