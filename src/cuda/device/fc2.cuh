#pragma once

#include "cuda/device/combine.cuh"
#include "cuda/device/gated_rows.cuh"
#include "cuda/device/gemm.cuh"

// The GEMMs with w2: fc2 with the push, and its data gradient dfc2 with dSwiGLU in its epilogue.

namespace uniep::cuda {

/// y = a w2^T, pushed.
/// Maps: a = a (I, rows); b = w2 (I, H, El), box 64 x kN.
template <class Shape>
struct Fc2 : RowPush<Shape> {
  static constexpr Stage kStage = Stage::kFc2;
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kK;

  static __device__ __forceinline__ void load(const StageMaps& maps, OperandSlot<Shape>& slot,
                                              std::uint64_t* full, const TileWork& work,
                                              int k_block) {
    const int k = k_block * kTileK;
    load_rows(maps, slot, full, work, k);
    ptx::tma_load(slot.b, maps.b, full, k, work.n, work.expert);
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps&,
                                              const TileWork& work) {
    push_rows(sender, rows_to_push(sender, work), work);
  }
};

/// da = dy w2, and from it dh, the column groups of dprobs, and a once more (for wgrad2).
/// Maps: a = dy_rows (H, rows); b = w2 (I, H, El), boxes 64 x 64; aux = h (I, 2, rows), box 64 x
/// 128; out0 = dh (I, 2, rows), out1 = a (I, rows), boxes 64 x 64.
template <class Shape>
struct Dfc2 {
  static constexpr Stage kStage = Stage::kDfc2;
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kMn;

  static __device__ __forceinline__ void load(const StageMaps& maps, OperandSlot<Shape>& slot,
                                              std::uint64_t* full, const TileWork& work,
                                              int k_block) {
    const int k = k_block * kTileK;
    load_rows(maps, slot, full, work, k);
    load_squares<Shape::kN / 64>(slot.b, maps.b, full, work.n, k, work.expert);
  }

  /// The tile's h comes through the pipeline too, 64 columns of either half a slot: the gate half
  /// where a lies, the up half where b begins.
  static constexpr int kEpilogueSlots = Shape::kN / kBoxCols;
  static __device__ __forceinline__ void load_epilogue(const StageMaps& maps,
                                                       OperandSlot<Shape>& slot,
                                                       std::uint64_t* full, const TileWork& work,
                                                       int chunk) {
    ptx::mbarrier_arrive_expect(full, 2 * kTileM * kBoxCols * 2);
    const int col = work.n + chunk * kBoxCols;
    ptx::tma_load(slot.a, maps.aux, full, col, 0, work.first_row);
    ptx::tma_load(slot.b, maps.aux, full, col, 1, work.first_row);
  }

  static __device__ __forceinline__ RowProbs prepare(const Consumer<Shape>& consumer,
                                                     const TileWork& work) {
    const float* probs =
        consumer.ctx.row_probs + work.first_row + consumer.first_row() + consumer.lane / 4;
    return {{probs[0], probs[8]}};
  }

  /// dh replaces h in its slot, of which this warp alone uses these rows; a goes through the
  /// consumer's own boxes in turn.
  static __device__ __forceinline__ void finish(Consumer<Shape>& consumer,
                                                const float (&acc)[Shape::kAccumulators],
                                                const TileWork& work, const RowProbs& probs) {
#pragma unroll
    for (int chunk = 0; chunk < kEpilogueSlots; ++chunk) {
      OperandSlot<Shape>& slot = consumer.wait_slot();
      std::uint8_t* gate_box = slot.a + kTileK * 2 * consumer.first_row();
      std::uint8_t* up_box = slot.b + kTileK * 2 * consumer.first_row();
      std::uint32_t gate[kPairs], up[kPairs], a[kPairs];
      load_box(gate_box, gate);
      load_box(up_box, up);
      float group[2] = {0, 0};
      const float* da = acc + chunk * 2 * kPairs;
      if (any_unusual_gate(gate)) {
        differentiate<false>(da, probs, gate, up, a, group);
      } else {
        differentiate<true>(da, probs, gate, up, a, group);
      }
      store_group(consumer, group, work, chunk);
      __syncwarp();
      store_box(gate_box, gate);
      store_box(up_box, up);
      consumer.write_box(chunk % Shape::kOwnBoxes, a);
      consumer.ring.advance();
    }
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps& maps,
                                              const TileWork& work) {
    const int row = work.first_row + kConsumerRows * sender.index;
    for (int chunk = 0; chunk < kEpilogueSlots; ++chunk) {
      const int box = chunk % Shape::kOwnBoxes;
      const int col = work.n + chunk * kBoxCols;
      sender.wait_written(box);
      if (sender.lane == 0) {
        OperandSlot<Shape>& slot = sender.shared.slots[sender.ring.slot];
        ptx::tma_store(maps.out0, slot.a + sender.index * kBoxBytes, col, 0, row);
        ptx::tma_store(maps.out0, slot.b + sender.index * kBoxBytes, col, 1, row);
        ptx::tma_store(maps.out1, output_box(sender.shared, sender.index, 0, box), col, row, 0);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        sender.give_back(box);
      }
      sender.give_back_slot();
    }
    if (sender.lane == 0) {
      sender.signal_tile(work, sender.ctx.counters.tile_done + work.tile,
                         sender.ctx.counters.expert_done + work.expert);
    }
  }

 private:
  struct Gradients {
    float gate, up, a, dprob;
  };

  /// h_g and h_u become dh; a is recomputed; dprobs are added up over the thread's columns.
  template <bool kUsual>
  static __device__ __forceinline__ void differentiate(const float* acc, const RowProbs& probs,
                                                       std::uint32_t (&gate)[kPairs],
                                                       std::uint32_t (&up)[kPairs],
                                                       std::uint32_t (&a)[kPairs],
                                                       float (&group)[2]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const std::uint32_t da = pack_pair(acc[2 * i], acc[2 * i + 1]);
      const float p = probs.of[i % 2];
      const Gradients low = gradients<kUsual>(p, low_of(da), low_of(gate[i]), low_of(up[i]));
      const Gradients high = gradients<kUsual>(p, high_of(da), high_of(gate[i]), high_of(up[i]));
      gate[i] = pack_pair(low.gate, high.gate);
      up[i] = pack_pair(low.up, high.up);
      a[i] = pack_pair(low.a, high.a);
      group[i % 2] = group[i % 2] + low.dprob;
      group[i % 2] = group[i % 2] + high.dprob;
    }
  }

  template <bool kUsual>
  static __device__ __forceinline__ Gradients gradients(float p, float da, float gate, float up) {
    const float s = sigmoid<kUsual>(gate);
    const float activated = silu(gate, s);
    const float product = activated * up;
    const float weighted = p * da;
    return {(weighted * up) * silu_grad(gate, s), weighted * activated, p * product, da * product};
  }

  /// dprobs of 64 columns: a thread's columns ascending, then the four threads of a row pairwise.
  /// The same order whatever the tile, so bit-neutral; the CPU backend uses another one.
  static __device__ __forceinline__ void store_group(const Consumer<Shape>& consumer,
                                                     const float (&group)[2], const TileWork& work,
                                                     int chunk) {
    const DeviceContext& ctx = consumer.ctx;
    const std::int64_t groups = ceil_div(ctx.view.intermediate, kDprobGroup);
    const int col = work.n + chunk * kBoxCols;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = group[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (consumer.lane % 4 == 0 && col < ctx.view.intermediate) {
        const std::int64_t row =
            work.first_row + consumer.first_row() + consumer.lane / 4 + 8 * half;
        ctx.dprob_groups[row * groups + col / kDprobGroup] = sum;
      }
    }
  }
};

}  // namespace uniep::cuda
