#pragma once

#include <type_traits>

#include "cuda/device/sm90/gemm.cuh"

namespace uniep::cuda {

/// A weight gradient: left^T right, summed over an expert's rows in canonical order, 64 rows at a
/// time from the segment's first. Rows behind its last, up to the next multiple of 64, are zeros of
/// the operand that was dispatched; of the other they are what fc1 and dfc2 made of zeros, and so
/// zeros where weights are finite.
/// kWgrad is wgrad2 (dw2 = dy^T a) or wgrad1 (dw1 = dh^T x). It is overwritten in bf16, or added to
/// a tensor of `Main`, float or bf16: a kernel with both would not have registers enough.
/// Maps: a = left (M, rows), b = right (N, rows), boxes 64 x 64; out0 = dw (N, M, El), box 64 x 64.
template <class Shape, Stage kWgrad, class Main>
struct Wgrad : EmptyEpilogueSlots<Shape, (OutputRing<Shape>::borrows(Shape::kN / kBoxCols))> {
  static constexpr Stage kStage = kWgrad;
  static constexpr ptx::Major kMajorA = ptx::Major::kMn;
  static constexpr ptx::Major kMajorB = ptx::Major::kMn;
  static constexpr int kBoxes = Shape::kN / kBoxCols;
  static constexpr bool kBorrows = Wgrad::kEpilogueSlots > 0;

  static __device__ __forceinline__ void load(const StageMaps& maps, OperandSlot<Shape>& slot,
                                              std::uint64_t* full, const TileWork& work,
                                              int k_block) {
    const int row = work.first_row + k_block * kTileK;
    load_squares<kTileM / 64>(slot.a, maps.a, full, work.m, row, 0);
    load_squares<Shape::kN / 64>(slot.b, maps.b, full, work.n, row, 0);
  }

  static __device__ __forceinline__ Nothing prepare(const Consumer<Shape>&, const TileWork&) {
    return {};
  }

  static __device__ __forceinline__ void finish(Consumer<Shape>& consumer,
                                                const float (&acc)[Shape::kAccumulators],
                                                const TileWork& work, const Nothing&) {
    if (main_grad(consumer.ctx) != nullptr) {
      if (work.rows > 0) accumulate_main_grad(consumer, acc, work);  // else it keeps what it holds
      if (kBorrows) consumer.pass_on_slot();
      return;
    }
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      std::uint32_t pairs[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int j = box * 2 * kPairs + 2 * i;
        pairs[i] = work.rows > 0 ? pack_pair(acc[j], acc[j + 1]) : 0;
      }
      consumer.write_box(OutputRing<Shape>::box_of(box, kBoxes), pairs);
    }
    if (kBorrows) consumer.ring.advance();
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps& maps,
                                              const TileWork& work) {
    if (main_grad(sender.ctx) != nullptr) {
      if (kBorrows) sender.return_unused_slot();
      return;
    }
    const int row = work.m + kConsumerRows * sender.index;
    sender.send_boxes(kBoxes, [&](int i, const std::uint8_t* box) {
      ptx::tma_store(maps.out0, box, work.n + i * kBoxCols, row, work.expert);
    });
  }

 private:
  static __device__ __forceinline__ Main* main_grad(const DeviceContext& ctx) {
    return static_cast<Main*>(kStage == Stage::kWgrad1 ? ctx.main_dw1 : ctx.main_dw2);
  }

  static __device__ __forceinline__ void accumulate_main_grad(
      const Consumer<Shape>& consumer, const float (&acc)[Shape::kAccumulators],
      const TileWork& work) {
    const StageGrid grid = stage_grid(consumer.ctx.view, kStage);
    const std::int64_t first = work.m + consumer.first_row() + consumer.lane() / 4;
    Main* expert = main_grad(consumer.ctx) + work.expert * grid.rows * grid.cols;
    if constexpr (std::is_same_v<Main, bf16>) return add_rows(expert, grid, first, acc, work);
#pragma unroll
    for (int i = 0; i < Shape::kAccumulators / 2; ++i) {
      const std::int64_t row = first + 8 * (i % 2);
      const std::int64_t col = work.n + 8 * (i / 2) + 2 * (consumer.lane() % 4);
      if (row >= grid.rows || col >= grid.cols) continue;
      auto* at = reinterpret_cast<float2*>(expert + row * grid.cols + col);
      float2 v = *at;
      v.x = v.x + acc[2 * i];
      v.y = v.y + acc[2 * i + 1];
      *at = v;
    }
  }

  /// To a bf16 tensor, one of the thread's two rows after the other: registers do not suffice for
  /// the places of all pairs.
  static __device__ __forceinline__ void add_rows(bf16* expert, const StageGrid& grid,
                                                  std::int64_t first,
                                                  const float (&acc)[Shape::kAccumulators],
                                                  const TileWork& work) {
    const std::int64_t col = work.n + 2 * (ptx::lane_id() % 4);
    const auto cols = static_cast<int>(min_of<std::int64_t>(grid.cols - col, Shape::kN));
    auto* at = reinterpret_cast<std::uint32_t*>(expert + first * grid.cols + col);
#pragma unroll
    for (int half = 0; half < 2; ++half, at += 4 * grid.cols) {
      if (first + 8 * half >= grid.rows) return;
#pragma unroll
      for (int j = 0; j < Shape::kN / 8; ++j) {
        if (8 * j >= cols) break;
        const int i = 2 * (2 * j + half);
        const std::uint32_t v = at[4 * j];
        at[4 * j] = pack_pair(low_of(v) + acc[i], high_of(v) + acc[i + 1]);
      }
    }
  }
};

template <class Shape, class Main>
using Wgrad2 = Wgrad<Shape, Stage::kWgrad2, Main>;
template <class Shape, class Main>
using Wgrad1 = Wgrad<Shape, Stage::kWgrad1, Main>;

}  // namespace uniep::cuda
