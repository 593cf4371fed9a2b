#pragma once

#include "cuda/device/sm90/gated_rows.cuh"
#include "cuda/device/sm90/gemm.cuh"
#include "cuda/device/warp.cuh"

// dfc2, the data gradient of fc2, with the activation's derivative in its epilogue.

namespace uniep::cuda {

/// da = dy w2, and from it dh, the column groups of dprobs, and a once more (for wgrad2).
/// Maps: a = dy_rows (H, rows); b = w2 (I, H, El), boxes 64 x 64; aux = h (I, 2, rows), box 64 x
/// 128; out0 = dh (I, 2, rows), out1 = a (I, rows), boxes 64 x 64.
/// kAnyGate: as of Fc1.
template <class Shape, bool kAnyGate = false>
struct Dfc2 {
  static constexpr Stage kStage = Stage::kDfc2;
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kMn;

  static __device__ __forceinline__ void load(const DeviceContext&, const StageMaps& maps,
                                              OperandSlot<Shape>& slot, std::uint64_t* full,
                                              const TileWork& work, int k_block) {
    load_rows_and_squares(maps, slot, full, work, k_block * kTileK);
  }

  /// The tile's h comes through the pipeline too, 64 columns of either half a slot: the gate half
  /// where a lies, the up half where b begins.
  static constexpr int kEpilogueSlots = Shape::kN / kBoxCols;
  static __device__ __forceinline__ void load_epilogue(const DeviceContext& ctx,
                                                       const StageMaps& maps,
                                                       OperandSlot<Shape>& slot,
                                                       std::uint64_t* full, const TileWork& work,
                                                       int chunk) {
    ptx::mbarrier_arrive_expect(full, 2 * kTileM * kBoxCols * kOperandBytes);
    const int col = work.n + chunk * kBoxCols;
    const int row = first_row_in<Tensor::kH>(ctx, work);
    ptx::tma_load(slot.a, maps.aux, full, col, 0, row);
    ptx::tma_load(slot.b, maps.aux, full, col, 1, row);
  }

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
    GroupSums sums{};
#pragma unroll 1
    for (int chunk = 0; chunk < kEpilogueSlots; ++chunk) {
      OperandSlot<Shape>& slot = consumer.wait_slot();
      const std::uint8_t* da = da_box(consumer.shared, consumer.index, consumer.ring.slot, chunk);
      __syncwarp();
      float dprobs[2] = {0, 0};  // of this chunk
      const Boxes boxes{box_address(slot.a + kTileK * kOperandBytes * consumer.first_row()),
                        box_address(slot.b + kTileK * kOperandBytes * consumer.first_row()),
                        box_address(da + consumer.warp() * (kBoxBytes / 4))};
      if constexpr (kAnyGate) {
        with_gate(consumer.ctx.view.activation, [&]<Activation kActivation>() {
          differentiate_as<kActivation>(boxes, probs, dprobs);
        });
      } else {
        differentiate(boxes, probs, dprobs);
      }
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
        ptx::tma_store(maps.out0, h.b + sender.index * kBoxBytes, col, 1, row);
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
  struct Gradients {
    float gate, up, a, dprob;
  };
  /// Where this lane's rows of the boxes of h_g, h_u and da begin.
  struct Boxes {
    std::uint32_t gate, up, da;
  };

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

  static constexpr int kGroups = kBoxCols / 16;  // of 16 columns, in a chunk

  /// h_g and h_u become dh, and da becomes a; dprobs are added up over the thread's columns.
  /// Whether gates are usual is asked once for all: between branches the compiler could not mix the
  /// steps of one group with those of the next.
  static __device__ __forceinline__ void differentiate(const Boxes& boxes, const RowProbs& probs,
                                                       float (&dprobs)[2]) {
    MatrixPairs gates[kGroups];
    bool unusual = false;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      load_matrices(group_address(boxes.gate, group), gates[group]);
    }
#pragma unroll
    for (const MatrixPairs& gate : gates) unusual = unusual || has_unusual_gate(gate);
    if (__any_sync(kWholeWarp, unusual)) {
#pragma unroll 1
      for (int group = 0; group < kGroups; ++group) {
        MatrixPairs gate;
        load_matrices(group_address(boxes.gate, group), gate);
        float s[2 * kMatrixPairs];
        sigmoids_of<false>(gate, s);
        differentiate(boxes, group, load_inputs(boxes, group), gate, s, probs, dprobs);
      }
    } else {
      differentiate_usual(boxes, gates, probs, dprobs);
    }
  }

  /// The same of another activation, element after element: side by side, they would take registers
  /// that the products of this kernel need.
  template <Activation kActivation>
  static __device__ __forceinline__ void differentiate_as(const Boxes& boxes, const RowProbs& probs,
                                                          float (&dprobs)[2]) {
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      MatrixPairs gate;
      load_matrices(group_address(boxes.gate, group), gate);
      Inputs inputs = load_inputs(boxes, group);
#pragma unroll 1
      for (int element = 0; element < 2 * kMatrixPairs; ++element) {
        const int i = element / 2, shift = element % 2 * 16;
        const auto half = [shift](std::uint32_t pair) { return low_of(pair >> shift); };
        const Gradients d =
            gradients_of<kActivation>(pick(probs.of, i % 2), half(pick(inputs.da, i)),
                                      half(pick(gate, i)), half(pick(inputs.up, i)));
        const auto replace = [&](MatrixPairs& pairs, float value) {
          const std::uint32_t rest = pick(pairs, i) & (0xffff0000u >> shift);
          put(pairs, i, rest | pack_pair(value, 0) << shift);
        };
        replace(gate, d.gate);
        replace(inputs.up, d.up);
        replace(inputs.da, d.a);
        put(dprobs, i % 2, pick(dprobs, i % 2) + d.dprob);
      }
      store_matrices(group_address(boxes.gate, group), gate);
      store_matrices(group_address(boxes.up, group), inputs.up);
      store_matrices(group_address(boxes.da, group), inputs.da);
    }
  }

  template <Activation kActivation>
  static __device__ __forceinline__ Gradients gradients_of(float p, float da, float gate,
                                                           float up) {
    const ValueSlope g = gate_at<kActivation, DeviceMath>(gate);
    const ValueSlope u = up_at<kActivation>(up);
    const float product = g.value * u.value;
    const float weighted = p * da;
    return {(weighted * u.value) * g.slope, (weighted * g.value) * u.slope, p * product,
            da * product};
  }

  /// The sigmoids of a group are begun, and what else it needs is read, before the group ahead of
  /// it is done.
  static __device__ __forceinline__ void differentiate_usual(const Boxes& boxes,
                                                             const MatrixPairs (&gates)[kGroups],
                                                             const RowProbs& probs,
                                                             float (&dprobs)[2]) {
    Inputs inputs = load_inputs(boxes, 0);
    float s[2 * kMatrixPairs];
    sigmoids_of<true>(gates[0], s);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      Inputs next_inputs{};
      float next_s[2 * kMatrixPairs]{};
      if (group + 1 < kGroups) {
        next_inputs = load_inputs(boxes, group + 1);
        sigmoids_of<true>(gates[group + 1], next_s);
      }
      differentiate(boxes, group, inputs, gates[group], s, probs, dprobs);
      inputs = next_inputs;
#pragma unroll
      for (int i = 0; i < 2 * kMatrixPairs; ++i) s[i] = next_s[i];
    }
  }

  /// What a group needs beside its gates.
  struct Inputs {
    MatrixPairs up, da;
  };
  static __device__ __forceinline__ Inputs load_inputs(const Boxes& boxes, int group) {
    Inputs inputs;
    load_matrices(group_address(boxes.up, group), inputs.up);
    load_matrices(group_address(boxes.da, group), inputs.da);
    return inputs;
  }

  static __device__ __forceinline__ void differentiate(const Boxes& boxes, int group,
                                                       const Inputs& inputs,
                                                       const MatrixPairs& gate,
                                                       const float (&s)[2 * kMatrixPairs],
                                                       const RowProbs& probs, float (&dprobs)[2]) {
    MatrixPairs dgate, dup, a;
#pragma unroll
    for (int i = 0; i < kMatrixPairs; ++i) {
      const float p = probs.of[i % 2];
      const std::uint32_t da = inputs.da[i], g = gate[i], u = inputs.up[i];
      const Gradients low = gradients(p, low_of(da), low_of(g), s[2 * i], low_of(u));
      const Gradients high = gradients(p, high_of(da), high_of(g), s[2 * i + 1], high_of(u));
      dgate[i] = pack_pair(low.gate, high.gate);
      dup[i] = pack_pair(low.up, high.up);
      a[i] = pack_pair(low.a, high.a);
      dprobs[i % 2] = dprobs[i % 2] + low.dprob;
      dprobs[i % 2] = dprobs[i % 2] + high.dprob;
    }
    store_matrices(group_address(boxes.gate, group), dgate);
    store_matrices(group_address(boxes.up, group), dup);
    store_matrices(group_address(boxes.da, group), a);
  }

  static __device__ __forceinline__ Gradients gradients(float p, float da, float gate, float s,
                                                        float up) {
    const float activated = silu(gate, s);
    const float product = activated * up;
    const float weighted = p * da;
    return {(weighted * up) * silu_grad(gate, s), weighted * activated, p * product, da * product};
  }

  static_assert(kBoxCols == kDprobGroup, "a chunk is a group");

  /// A thread's dprobs in each chunk, of its two rows.
  struct GroupSums {
    float of[kEpilogueSlots][2];
  };

  /// dprobs of 64 columns: a thread's columns ascending, then the four threads of a row pairwise.
  /// The same order whatever the tile, so bit-neutral; the CPU backend uses another one. For all
  /// chunks together: one after another, each would wait for its shuffles.
  static __device__ __forceinline__ void store_groups(const Consumer<Shape>& consumer,
                                                      const GroupSums& sums, const TileWork& work) {
    const DeviceContext& ctx = consumer.ctx;
    const std::int64_t groups = dprob_groups(ctx.view.intermediate);
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
