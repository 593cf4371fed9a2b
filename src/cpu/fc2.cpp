// The GEMMs with w2: fc2 with the push, and its data gradient dfc2 with dSwiGLU in its epilogue.
#include "cpu/stages.h"

namespace uniep::cpu {

// y = a w2^T, pushed.
void fc2(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const Tile& tile = v.tiles[task.m];
  const auto [first, cols] = column_tile(stage_grid(v, Stage::kFc2), task.n);

  const MatrixView a{ctx.get<Tensor::kA>() + tile.first_row * v.intermediate, v.intermediate, 1};
  const bf16* w2 = ctx.get<Tensor::kW2>() + tile.expert * v.hidden * v.intermediate;
  const MatrixView weights{w2 + first * v.intermediate, 1, v.intermediate};
  float* y = scratch.accumulators.reserve(static_cast<std::size_t>(tile.rows * cols));
  gemm_tile(ctx.kernels, tile.rows, cols, v.intermediate, a, weights, y, cols, scratch.packing);
  push_rows(ctx, tile, first, cols, y);
}

// da = dy w2, and from it dh, the column groups of dprobs, and a once more (for wgrad2).
void dfc2(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const Tile& tile = v.tiles[task.m];
  const auto [first, cols] = column_tile(stage_grid(v, Stage::kDfc2), task.n);

  const MatrixView dy{ctx.get<Tensor::kDyRows>() + tile.first_row * v.hidden, v.hidden, 1};
  const MatrixView weights{ctx.get<Tensor::kW2>() + tile.expert * v.hidden * v.intermediate + first,
                           v.intermediate, 1};
  float* da = scratch.accumulators.reserve(static_cast<std::size_t>(tile.rows * cols));
  gemm_tile(ctx.kernels, tile.rows, cols, v.hidden, dy, weights, da, cols, scratch.packing);

  const std::int64_t groups = dprob_groups(v.intermediate);
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const std::int64_t row = tile.first_row + i;
    const bf16* h = ctx.get<Tensor::kH>() + ctx.row<Tensor::kH>(row) * 2 * v.intermediate + first;
    const float prob = ctx.get<Tensor::kRowProbs>()[ctx.row<Tensor::kRowProbs>(row)];
    bf16* dh = ctx.get<Tensor::kDh>() + row * 2 * v.intermediate + first;
    ctx.kernels.dswiglu(cols, da + i * cols, h, h + v.intermediate, prob, dh, dh + v.intermediate,
                        ctx.get<Tensor::kA>() + row * v.intermediate + first,
                        ctx.get<Tensor::kDprobGroups>() + row * groups + first / kDprobGroup);
  }
}

}  // namespace uniep::cpu
