#pragma once

#include "cuda/device/combine.cuh"
#include "cuda/device/gated_rows.cuh"

// The GEMMs with w1: fc1 with SwiGLU behind it, and its data gradient dfc1 with the push.

namespace uniep::cuda {

/// h = x w1^T and a = p (silu(h_g) h_u). The tile's columns are kN / 2 of the gate half, then the
/// same of the up half; boxes are in turn of either.
/// Maps: a = x_rows (H, rows); b = w1 (H, I, 2, El), box 64 x kN / 2.
template <class Shape>
struct Fc1 : BoxStage<Shape> {
  static constexpr Stage kStage = Stage::kFc1;
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kK;
  static constexpr int kHalf = Shape::kN / 2;

  static __device__ __forceinline__ void load(const StageMaps& maps, OperandSlot<Shape>& slot,
                                              std::uint64_t* full, const TileWork& work,
                                              int k_block) {
    const int k = k_block * kTileK;
    load_rows(maps, slot, full, work, k);
    ptx::tma_load(slot.b, maps.b, full, k, work.n, 0, work.expert);
    ptx::tma_load(slot.b + kHalf * kTileK * 2, maps.b, full, k, work.n, 1, work.expert);
  }

  static __device__ __forceinline__ void write(Consumer<Shape>& consumer,
                                               const float (&acc)[Shape::kAccumulators],
                                               const TileWork&) {
    Fc1::write_boxes(consumer, acc, false,
                     [](int box) { return box % 2 * (kHalf / 2) + box / 2 * 2 * kPairs; });
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps&,
                                              const TileWork& work) {
    const DeviceContext& ctx = sender.ctx;
    const GatedRows<Shape> rows(sender, work, [&](int row) { return source_prob(ctx, work, row); });
#pragma unroll 1
    for (int chunk = 0; chunk < kHalf / kBoxCols; ++chunk) {
      sender.wait_written(2 * chunk);
      sender.wait_written(2 * chunk + 1);
#pragma unroll 1
      for (int step = 0; step < GatedRows<Shape>::kSteps; ++step) {
        const RowVector at = rows.at(chunk, step);
        const Halves h{sender.read(2 * chunk, at.row, at.vector),
                       sender.read(2 * chunk + 1, at.row, at.vector)};
        const Vector a = activate(h, at.prob);
        if (!at.stores) continue;
        store_halves(ctx.h + at.gate_offset(), rows.inter(), h);
        store_vector(ctx.a + at.offset, a);
      }
      sender.give_back(2 * chunk);
      sender.give_back(2 * chunk + 1);
    }
    if (Fc1::kEpilogueSlots > 0) sender.give_back_slot();
    sender.signal_tile(work, ctx.counters.tile_done + work.tile, nullptr);
  }

 private:
  /// Of a row of the tile: from the rank that the row came from, of which dispatch has seen that it
  /// published; 0 of a pad row. The first column tile keeps it for backward.
  static __device__ __forceinline__ float source_prob(const DeviceContext& ctx,
                                                      const TileWork& work, int row) {
    if (row >= work.rows) return 0;
    const RowOrigin origin = ctx.view.row_origin[work.first_row + row];
    const std::int64_t slot = std::int64_t{origin.token} * ctx.view.topk + origin.slot;
    const float prob = __ldcg(ctx.at<float>(origin.source, ctx.symmetric.probs) + slot);
    if (work.n == 0) ctx.row_probs[work.first_row + row] = prob;
    return prob;
  }

  static __device__ __forceinline__ Vector activate(const Halves& h, float p) {
    float gate[kVectorElements], up[kVectorElements], s[kVectorElements];
    unpack(h.gate, gate);
    unpack(h.up, up);
    if (any_unusual_gate(gate)) {
      sigmoids<false>(gate, s);
    } else {
      sigmoids<true>(gate, s);
    }
    float a[kVectorElements];
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) a[i] = p * (silu(gate[i], s[i]) * up[i]);
    return pack(a);
  }
};

/// dx rows = dh w1, pushed. The first column tile also adds up the rows' dprobs, whose column
/// groups dfc2 has left. Maps: a = dh (2I, rows); b = w1 (H, 2I, El), boxes 64 x 64.
template <class Shape>
struct Dfc1 : RowPush<Shape> {
  static constexpr Stage kStage = Stage::kDfc1;
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kMn;

  static __device__ __forceinline__ void load(const StageMaps& maps, OperandSlot<Shape>& slot,
                                              std::uint64_t* full, const TileWork& work,
                                              int k_block) {
    const int k = k_block * kTileK;
    load_rows(maps, slot, full, work, k);
    load_squares<Shape::kN / 64>(slot.b, maps.b, full, work.n, k, work.expert);
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps&,
                                              const TileWork& work) {
    const PushRows rows = rows_to_push(sender, work);
    if (work.n == 0) push_dprobs(sender, rows, work);
    push_rows(sender, rows, work);
  }
};

}  // namespace uniep::cuda
