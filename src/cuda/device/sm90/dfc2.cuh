#pragma once

#include "cuda/device/sm90/activation_gradients.cuh"
#include "cuda/device/sm90/biases.cuh"
#include "cuda/device/sm90/gemm.cuh"
#include "cuda/device/sm90/step_sums.cuh"
#include "cuda/device/warp.cuh"

// dfc2, the data gradient of fc2, with the activation's derivative in its epilogue.

namespace uniep::cuda {

/// da = dy w2, and from it dh, the column groups of dprobs, and a once more (for wgrad2).
/// Maps: a = dy_rows (H, rows); b = w2 (I, H, El), boxes 64 x 64, or of each matrix [in, out] (H,
/// I), box 64 x kN; aux = h (I, 2, rows), box 64 x 128; out0 = dh (I, 2, rows), out1 = a (I, rows),
/// boxes 64 x 64.
/// kGeneral: as of Fc1.
template <class Shape, bool kGeneral = false>
struct Dfc2 {
  static constexpr Stage kStage = Stage::kDfc2;
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kMn;
  static constexpr bool kReadsAnyOrder = kGeneral;

  static __device__ __forceinline__ void load(const DeviceContext& ctx, const StageMaps& maps,
                                              OperandSlot<Shape>& slot, std::uint64_t* full,
                                              const TileWork& work, int first_token, int k_block) {
    load_rows_and_weights<Dfc2>(ctx, maps, slot, full, work, first_token, k_block * kTileK);
  }

  /// The tile's h comes through the pipeline too, 64 columns of either half a slot: the gate half
  /// where a lies, the up half where b begins.
  static constexpr int kEpilogueSlots = Shape::kN / kBoxCols;
  static __device__ __forceinline__ void load_epilogue(const DeviceContext& ctx,
                                                       const StageMaps& maps,
                                                       OperandSlot<Shape>& slot,
                                                       std::uint64_t* full, const TileWork& work,
                                                       int chunk) {
    const bool gated = has_up(ctx.view);
    ptx::mbarrier_arrive_expect(full, (gated ? 2 : 1) * kTileM * kBoxCols * kOperandBytes);
    const int col = work.n + chunk * kBoxCols;
    const int row = first_row_in<Tensor::kH>(ctx, work);
    ptx::tma_load(slot.a, maps.aux, full, col, 0, row);
    if (gated) ptx::tma_load(slot.b, maps.aux, full, col, 1, row);
  }

  /// Senders also multiply rows of dy with b2.
  static constexpr bool kSumsSteps = kGeneral;
  using StepSums = RowDots<Shape>;

  static __device__ __forceinline__ RowProbs prepare(const Consumer<Shape>& consumer,
                                                     const TileWork& work) {
    const float* probs = consumer.ctx.template get<Tensor::kRowProbs>() + work.saved_row +
                         consumer.first_row() + consumer.lane() / 4;
    return {{probs[0], probs[8]}};
  }

  /// All of da is put away in shared memory, and from there on a rolled loop reads 64 columns at a
  /// time and writes them back: without the accumulators it has registers for many elements at
  /// once. dh replaces h in its slot, of which this warp alone uses these rows, a replaces da.
  static __device__ __forceinline__ void finish(Consumer<Shape>& consumer,
                                                const float (&acc)[Shape::kAccumulators],
                                                const TileWork& work, const RowProbs& probs) {
    put_away(consumer, acc);
    const RowProbs factors = factors_of<kGeneral, Pass::kBackward>(consumer.ctx.view, probs);
    GroupSums sums{};
#pragma unroll 1
    for (int chunk = 0; chunk < kEpilogueSlots; ++chunk) {
      OperandSlot<Shape>& slot = consumer.wait_slot();
      const std::uint8_t* da = da_box(consumer.shared, consumer.index, consumer.ring.slot, chunk);
      __syncwarp();
      float dprobs[2] = {0, 0};  // of this chunk
      const ActivationBoxes boxes{
          box_address(slot.a + kTileK * kOperandBytes * consumer.first_row()),
          box_address(slot.b + kTileK * kOperandBytes * consumer.first_row()),
          box_address(da + consumer.warp() * (kBoxBytes / 4))};
      with_activation<kGeneral>(consumer.ctx.view.activation, [&]<Activation kActivation>() {
        ActivationGradients<kActivation>::run(boxes, factors, consumer.ctx.limits, consumer.ctx.erf,
                                              dprobs);
      });
#pragma unroll
      for (int i = 0; i < kEpilogueSlots; ++i) {
        if (i != chunk) continue;
        sums.of[i][0] = dprobs[0];
        sums.of[i][1] = dprobs[1];
      }
      // The last commit also hands these to the sender, whose signal covers them.
      if (chunk + 1 == kEpilogueSlots) store_groups(consumer, sums, work);
      consumer.commit(buffer_of(chunk));
      consumer.ring.advance();
    }
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps& maps,
                                              const TileWork& work) {
    const int row = work.first_row + kConsumerRows * sender.index;
    for (int chunk = 0; chunk < kEpilogueSlots; ++chunk) {
      const int col = work.n + chunk * kBoxCols;
      sender.wait_written(buffer_of(chunk));
      if (sender.lane == 0 && has_rows(work, sender.index)) {
        const int slot = sender.ring.slot;
        OperandSlot<Shape>& h = sender.shared.slots[slot];
        ptx::tma_store(maps.out0, h.a + sender.index * kBoxBytes, col, 0, row);
        if (has_up(sender.ctx.view)) {
          ptx::tma_store(maps.out0, h.b + sender.index * kBoxBytes, col, 1, row);
        }
        ptx::tma_store(maps.out1, da_box(sender.shared, sender.index, slot, chunk), col, row, 0);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
      __syncwarp();
      sender.give_back(buffer_of(chunk));
      sender.give_back_slot();
    }
    if (sender.lane == 0) sender.template signal_tile<kStage>(work);
  }

 private:
  static __device__ __forceinline__ bool has_up(const PassView& v) {
    return !kGeneral || is_gated(v.activation);
  }

  /// da of the last chunks lies in the consumer's own boxes, that of the chunks before in the rest
  /// of b in their slots.
  static constexpr int kInSlots = kEpilogueSlots - Shape::kOwnBoxes;
  static_assert(kInSlots >= 0);
  static_assert(kInSlots == 0 || 2 * kTileM * kBoxCols <= kTileK * Shape::kN, "no room behind h_u");

  /// The output buffer that stands for a chunk's outputs.
  static __device__ constexpr int buffer_of(int chunk) {
    return chunk < kInSlots ? Shape::kOwnBoxes + chunk : chunk - kInSlots;
  }
  static __device__ __forceinline__ std::uint8_t* da_box(PassShared<Shape>& shared, int consumer,
                                                         int slot, int chunk) {
    if (chunk < kInSlots) return shared.slots[slot].b + (kConsumers + consumer) * kBoxBytes;
    return OutputRing<Shape>::box(shared, consumer, slot, buffer_of(chunk));
  }

  static __device__ __forceinline__ void put_away(Consumer<Shape>& consumer,
                                                  const float (&acc)[Shape::kAccumulators]) {
    SlotRing<Shape> ring = consumer.ring;
#pragma unroll
    for (int chunk = 0; chunk < kEpilogueSlots; ++chunk) {
      consumer.acquire(buffer_of(chunk));
      if (chunk < kInSlots) ptx::mbarrier_wait(&consumer.shared.full[ring.slot], ring.parity);
      std::uint32_t da[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int j = chunk * 2 * kPairs + 2 * i;
        da[i] = pack_pair(acc[j], acc[j + 1]);
      }
      store_box(da_box(consumer.shared, consumer.index, ring.slot, chunk) +
                    consumer.warp() * (kBoxBytes / 4),
                da);
      ring.advance();
    }
  }

  static_assert(kBoxCols == kDprobGroup, "a chunk is a group");

  /// A thread's dprobs in each chunk, of its two rows.
  struct GroupSums {
    float of[kEpilogueSlots][2];
  };

  /// Stores dprobs of 64 columns: a thread's columns are added up ascending, then the four threads
  /// of a row pairwise. The order is the same whatever the tile, so bit-neutral; the CPU backend
  /// uses another one. All chunks are done together: one after another, each would wait for its
  /// shuffles.
  static __device__ __forceinline__ void store_groups(const Consumer<Shape>& consumer,
                                                      const GroupSums& sums, const TileWork& work) {
    const DeviceContext& ctx = consumer.ctx;
    const std::int64_t groups = sums_of_row<kGeneral>(ctx.view);
    const int lane = consumer.lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t row = work.first_row + consumer.first_row() + lane / 4 + 8 * half;
      float* to = ctx.get<Tensor::kDprobGroups>() + row * groups + work.n / kBoxCols;
#pragma unroll
      for (int chunk = 0; chunk < kEpilogueSlots; ++chunk) {
        float sum = sums.of[chunk][half];
        sum += __shfl_xor_sync(kWholeWarp, sum, 1);
        sum += __shfl_xor_sync(kWholeWarp, sum, 2);
        const bool exists = work.n + chunk * kBoxCols < ctx.view.intermediate;
        if (lane % 4 == 0 && exists) to[chunk] = sum;
      }
    }
  }
};

}  // namespace uniep::cuda
