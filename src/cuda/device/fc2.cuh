#pragma once

#include "cuda/device/combine.cuh"
#include "cuda/device/gated_rows.cuh"

// The GEMMs with w2: fc2 with the push, and its data gradient dfc2 with dSwiGLU behind it.

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

/// da = dy w2, and from it and h: dh, the column groups of dprobs, and a once more (for wgrad2).
/// Maps: a = dy_rows (H, rows); b = w2 (I, H, El), boxes 64 x 64.
template <class Shape>
struct Dfc2 : BoxStage<Shape> {
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

  static __device__ __forceinline__ void write(Consumer<Shape>& consumer,
                                               const float (&acc)[Shape::kAccumulators],
                                               const TileWork&) {
    Dfc2::write_boxes(consumer, acc, false, [](int box) { return box * 2 * kPairs; });
  }

  /// h is asked for some steps ahead.
  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps&,
                                              const TileWork& work) {
    using Rows = GatedRows<Shape>;
    constexpr int kAhead = 2;
    static_assert(Rows::kSteps % kAhead == 0);
    const DeviceContext& ctx = sender.ctx;
    const Rows rows(sender, work, [&](int row) { return ctx.row_probs[work.first_row + row]; });
    const auto load = [&](int chunk, int step) {
      const RowVector at = rows.at(chunk, step);
      return at.stores ? load_halves(ctx.h + at.gate_offset(), rows.inter()) : Halves{};
    };
    Halves ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = load(0, i);
#pragma unroll 1
    for (int chunk = 0; chunk < Dfc2::kBoxes; ++chunk) {
      sender.wait_written(chunk);
#pragma unroll 1
      for (int step = 0; step < Rows::kSteps; step += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const Halves h = ahead[i];
          const bool in_chunk = step + kAhead < Rows::kSteps;
          if (in_chunk || chunk + 1 < Dfc2::kBoxes) {
            ahead[i] = load(in_chunk ? chunk : chunk + 1, (step + kAhead) % Rows::kSteps + i);
          }
          const RowVector at = rows.at(chunk, step + i);
          differentiate(ctx, rows, at, sender.read(chunk, at.row, at.vector), h);
        }
      }
      sender.give_back(chunk);
    }
    if (Dfc2::kEpilogueSlots > 0) sender.give_back_slot();
    sender.signal_tile(work, ctx.counters.tile_done + work.tile,
                       ctx.counters.expert_done + work.expert);
  }

 private:
  /// One step: dh, a and the part of dprobs, stored.
  static __device__ __forceinline__ void differentiate(const DeviceContext& ctx,
                                                       const GatedRows<Shape>& rows,
                                                       const RowVector& at, const Vector& das,
                                                       const Halves& h) {
    constexpr int kCount = kVectorElements;
    float da[kCount], gate[kCount], up[kCount], s[kCount];
    unpack(das, da);
    unpack(h.gate, gate);
    unpack(h.up, up);
    if (any_unusual_gate(gate)) {
      sigmoids<false>(gate, s);
    } else {
      sigmoids<true>(gate, s);
    }
    float dgate[kCount], dup[kCount], a[kCount];
    float dprob = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float activated = silu(gate[i], s[i]);
      const float product = activated * up[i];
      const float weighted = at.prob * da[i];
      dgate[i] = (weighted * up[i]) * silu_grad(gate[i], s[i]);
      dup[i] = weighted * activated;
      a[i] = at.prob * product;
      dprob = dprob + da[i] * product;
    }
    store_group(ctx, at, dprob);
    if (!at.stores) return;
    store_halves(ctx.dh + at.gate_offset(), rows.inter(), {pack(dgate), pack(dup)});
    store_vector(ctx.a + at.offset, pack(a));
  }

  /// dprobs of 64 columns: 8 columns ascending in a lane, then the 8 lanes of the row pairwise. The
  /// same order whatever the tile, so bit-neutral; the CPU backend uses another one.
  static __device__ __forceinline__ void store_group(const DeviceContext& ctx, const RowVector& at,
                                                     float dprob) {
    dprob += __shfl_xor_sync(0xffffffffu, dprob, 1);
    dprob += __shfl_xor_sync(0xffffffffu, dprob, 2);
    dprob += __shfl_xor_sync(0xffffffffu, dprob, 4);
    if (!at.stores || at.vector != 0) return;
    const std::int64_t groups = ceil_div(ctx.view.intermediate, kDprobGroup);
    ctx.dprob_groups[at.at * groups + at.col / kDprobGroup] = dprob;
  }
};

}  // namespace uniep::cuda
