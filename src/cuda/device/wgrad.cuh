#pragma once

#include "cuda/device/gemm.cuh"

namespace uniep::cuda {

/// A weight gradient: left^T right, summed over an expert's rows in canonical order, 64 rows at a
/// time from the segment's first (rows up to the next multiple of 64 are zeros).
/// kWgrad is wgrad2 (dw2 = dy^T a) or wgrad1 (dw1 = dh^T x).
/// Maps: a = left (M, rows), b = right (N, rows), boxes 64 x 64; out = dw (N, M, El), box 64 x 64.
template <class Shape, Stage kWgrad>
struct Wgrad : BoxStage<Shape> {
  static constexpr Stage kStage = kWgrad;
  static constexpr ptx::Major kMajorA = ptx::Major::kMn;
  static constexpr ptx::Major kMajorB = ptx::Major::kMn;
  static constexpr bool kBorrows = Wgrad::kEpilogueSlots > 0;

  static __device__ __forceinline__ void load(const StageMaps& maps, OperandSlot<Shape>& slot,
                                              std::uint64_t* full, const TileWork& work,
                                              int k_block) {
    const int row = work.first_row + k_block * kTileK;
    load_squares<kTileM / 64>(slot.a, maps.a, full, work.m, row, 0);
    load_squares<Shape::kN / 64>(slot.b, maps.b, full, work.n, row, 0);
  }

  /// An fp32 gradient leaves from the registers; of the buffers, the slot alone is passed on.
  template <class F>
  static __device__ __forceinline__ void for_each_buffer(const DeviceContext& ctx, F&& f) {
    if (main_grad(ctx) == nullptr) {
      BoxStage<Shape>::for_each_buffer(ctx, f);
    } else if (kBorrows) {
      f(Shape::kOwnBoxes);
    }
  }

  static __device__ __forceinline__ void write(Consumer<Shape>& consumer,
                                               const float (&acc)[Shape::kAccumulators],
                                               const TileWork& work) {
    if (main_grad(consumer.ctx) == nullptr) {
      return Wgrad::write_boxes(consumer, acc, work.k_blocks == 0,
                                [](int box) { return box * 2 * kPairs; });
    }
    if (work.rows > 0) accumulate_main_grad(consumer, acc, work);  // else it keeps what it holds
    for_each_buffer(consumer.ctx, [&](int buffer) {
      consumer.acquire(buffer);
      consumer.commit(buffer);
    });
    consumer.ring.advance(Wgrad::kEpilogueSlots);
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps& maps,
                                              const TileWork& work) {
    if (main_grad(sender.ctx) != nullptr) {
      for_each_buffer(sender.ctx, [&](int buffer) {
        sender.wait_written(buffer);
        sender.give_back(buffer);
      });
      if (kBorrows) sender.give_back_slot();
      return;
    }
    const int row = work.m + kConsumerRows * sender.index;
    for (int box = 0; box < Wgrad::kBoxes; ++box) {
      sender.wait_written(box);
      if (sender.lane == 0) {
        const auto* from = output_box(sender.shared, sender.index, sender.ring.slot, box);
        ptx::tma_store(maps.out, from, work.n + box * kBoxCols, row, work.expert);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
      sender.give_back(box);
    }
    if (kBorrows) sender.give_back_slot();
    if (sender.lane == 0) ptx::bulk_wait<0>();
  }

 private:
  static __device__ __forceinline__ float* main_grad(const DeviceContext& ctx) {
    return kStage == Stage::kWgrad1 ? ctx.main_dw1 : ctx.main_dw2;
  }

  static __device__ __forceinline__ void accumulate_main_grad(
      const Consumer<Shape>& consumer, const float (&acc)[Shape::kAccumulators],
      const TileWork& work) {
    const StageGrid grid = stage_grid(consumer.ctx.view, kStage);
    const std::int64_t first = work.m + consumer.first_row() + consumer.lane / 4;
    float* expert = main_grad(consumer.ctx) + work.expert * grid.rows * grid.cols;
#pragma unroll
    for (int i = 0; i < Shape::kN / 4; ++i) {
      const std::int64_t row = first + 8 * (i % 2);
      const std::int64_t col = work.n + 8 * (i / 2) + 2 * (consumer.lane % 4);
      if (row >= grid.rows || col >= grid.cols) continue;
      auto* at = reinterpret_cast<float2*>(expert + row * grid.cols + col);
      float2 v = *at;
      v.x = v.x + acc[2 * i];
      v.y = v.y + acc[2 * i + 1];
      *at = v;
    }
  }
};

template <class Shape>
using Wgrad2 = Wgrad<Shape, Stage::kWgrad2>;
template <class Shape>
using Wgrad1 = Wgrad<Shape, Stage::kWgrad1>;

}  // namespace uniep::cuda
