#pragma once

#include "cuda/device/sm90/activation_rows.cuh"
#include "cuda/device/sm90/biases.cuh"
#include "cuda/device/sm90/combine.cuh"

// fc2, the GEMM with w2, with the push. Its data gradient is in dfc2.cuh.

namespace uniep::cuda {

/// y = a w2^T, pushed. kGeneral: as of Fc1.
/// Maps: a = a (I, rows); b = w2 (I, H, El), box 64 x kN, or of each matrix [in, out] (H, I), box
/// 64 x 64.
template <class Shape, bool kGeneral = false>
struct Fc2 : RowPush<Shape> {
  static constexpr Stage kStage = Stage::kFc2;
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kK;
  static constexpr bool kReadsAnyOrder = kGeneral;

  static __device__ __forceinline__ void load(const DeviceContext& ctx, const StageMaps& maps,
                                              OperandSlot<Shape>& slot, std::uint64_t* full,
                                              const TileWork& work, int first_token, int k_block) {
    const int k = k_block * kTileK;
    load_rows<Tensor::kA>(ctx, maps, slot, full, work, first_token, k);
    if (k_block == 0) acquire_maps(maps.experts, work.expert);
    const MatrixBox box = matrix_box(maps.b, maps.experts, work.expert, 0);
    if (reads_in_out<Fc2>(ctx, work)) {
      return load_squares<Shape::kN / 64>(slot.b, *box.map, full, work.n, k, box.expert);
    }
    ptx::tma_load(slot.b, *box.map, full, k, work.n, box.expert);
  }

  /// b2, and the probabilities of a thread's two rows, which fc1 has kept. What follows from them
  /// waits for the epilogue: a thread stops where it uses what it has asked for.
  struct Bias {
    SpreadBias<Shape::kN / kBoxCols> b2;
    RowProbs probs;

    __device__ __forceinline__ Bias(const Consumer<Shape>& consumer, const TileWork& work) {
      const DeviceContext& ctx = consumer.ctx;
      if (!ctx.view.choice.has_bias) return;
      const float* of_rows = ctx.get<Tensor::kRowProbs>() + work.saved_row + consumer.first_row() +
                             consumer.lane() / 4;
      probs = {{__ldcg(of_rows), __ldcg(of_rows + 8)}};
#pragma unroll
      for (int i = 0; i < Shape::kN / kBoxCols; ++i) {
        b2.read(i, b2_of(ctx, work.expert), work.n + i * kBoxCols, ctx.view.hidden);
      }
    }
  };
  static __device__ __forceinline__ Bias prepare(const Consumer<Shape>& consumer,
                                                 const TileWork& work) requires(kGeneral) {
    return {consumer, work};
  }
  static __device__ __forceinline__ Nothing prepare(const Consumer<Shape>&,
                                                    const TileWork&) requires(!kGeneral) {
    return {};
  }

  using RowPush<Shape>::finish;
  static __device__ __forceinline__ void finish(Consumer<Shape>& consumer,
                                                const float (&acc)[Shape::kAccumulators],
                                                const TileWork&, const Bias& bias) {
    constexpr int kGroups = kBoxCols / 16;
    const PassView& v = consumer.ctx.view;
    const auto write = [&](auto&& change) { RowPush<Shape>::write_rows(consumer, acc, change); };
    // A way each: with branches for every group, none would begin before the last one's shuffles
    // have come.
    if (!v.choice.has_bias) {
      write([](int, MatrixPairs&) {});
    } else if (v.probs == Probs::kBefore) {  // factor_of_a
      write([&](int group, MatrixPairs& pairs) {
        bias.b2.add_to(group / kGroups, group % kGroups, bias.probs.of, pairs);
      });
    } else {
      write([&](int group, MatrixPairs& pairs) {
        bias.b2.add_to(group / kGroups, group % kGroups, pairs);
      });
    }
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps&,
                                              const TileWork& work) {
    push_rows<kStage>(sender, rows_to_push(sender, work), work);
  }
};

}  // namespace uniep::cuda
