#pragma once

#include "cuda/device/epilogue.cuh"

namespace uniep::cuda {

/// A weight gradient: left^T right, summed over an expert's rows in canonical order, 64 rows at a
/// time from the segment's first (rows up to the next multiple of 64 are zeros).
/// kStage is wgrad2 (dw2 = dy^T a) or wgrad1 (dw1 = dh^T x).
/// Maps: a = left (M, rows), b = right (N, rows), boxes 64 x 64; out0 = dw (N, M, El), box 64 x 16.
template <Stage kStage>
struct Wgrad : NoEpilogueLoads {
  static constexpr ptx::Major kMajorA = ptx::Major::kMn;
  static constexpr ptx::Major kMajorB = ptx::Major::kMn;

  static __device__ __forceinline__ TileWork work(const DeviceContext& ctx, const Task& task) {
    const auto rows = static_cast<int>(ctx.view.tokens_per_expert[task.expert]);
    return {.expert = task.expert,
            .first_row = static_cast<int>(ctx.view.segment_begin[task.expert]),
            .rows = rows,
            .m = static_cast<int>(task.m) * kTileM,
            .n = static_cast<int>(task.n) * kTileN,
            .k_blocks = ceil_div(rows, kTileK)};
  }

  static __device__ __forceinline__ void load(const StageMaps& maps, GemmShared& shared, int slot,
                                              const TileWork& work, int k_block) {
    std::uint64_t* full = &shared.full[slot];
    const int row = work.first_row + k_block * kTileK;
    load_squares<kTileM / 64>(shared.a[slot], maps.a, full, work.m, row, 0);
    load_squares<kTileN / 64>(shared.b[slot], maps.b, full, work.n, row, 0);
  }

  class Epilogue {
   public:
    __device__ __forceinline__ Epilogue(const DeviceContext& ctx, const StageMaps& maps,
                                        GemmShared& shared)
        : ctx_(ctx), maps_(maps), boxes_(shared) {}

    __device__ __forceinline__ void prepare(const TileWork&) {}

    __device__ __forceinline__ void run(const float (&acc)[128], const TileWork& work, StageRing&) {
      if (ctx_.main_grad != nullptr) {
        if (work.rows > 0) accumulate_main_grad(acc, work);  // else it keeps what it holds
        return;
      }
#pragma unroll
      for (int chunk = 0; chunk < kTileN / kBoxCols; ++chunk) {
        std::uint32_t pairs[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int j = chunk * 2 * kPairs + 2 * i;
          pairs[i] = work.k_blocks > 0 ? pack_pair(acc[j], acc[j + 1]) : 0;
        }
        boxes_.write(pairs, maps_.out0, work.n + chunk * kBoxCols, work.m + place_.first_row(),
                     work.expert);
      }
    }

    __device__ __forceinline__ void finish() {
      if (place_.lane == 0) ptx::bulk_wait<0>();
    }

   private:
    __device__ __forceinline__ void accumulate_main_grad(const float (&acc)[128],
                                                         const TileWork& work) {
      const StageGrid grid = stage_grid(ctx_.view, kStage);
      const std::int64_t first = work.m + place_.first_row() + place_.lane / 4;
      float* expert = ctx_.main_grad + work.expert * grid.rows * grid.cols;
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        const std::int64_t row = first + 8 * (i % 2);
        const std::int64_t col = work.n + 8 * (i / 2) + 2 * (place_.lane % 4);
        if (row >= grid.rows || col >= grid.cols) continue;
        auto* at = reinterpret_cast<float2*>(expert + row * grid.cols + col);
        float2 v = *at;
        v.x = v.x + acc[2 * i];
        v.y = v.y + acc[2 * i + 1];
        *at = v;
      }
    }

    const DeviceContext& ctx_;
    const StageMaps& maps_;
    WarpPlace place_;
    BoxWriter boxes_;
  };
};

using Wgrad2 = Wgrad<Stage::kWgrad2>;
using Wgrad1 = Wgrad<Stage::kWgrad1>;

}  // namespace uniep::cuda
