// The GEMMs with w1: fc1 with SwiGLU in its epilogue, and its data gradient dfc1 with the push.
#include "cpu/stages.h"

namespace uniep::cpu {

// h = x w1^T for the gate columns [first, first + cols) and the same up columns; a from both.
void fc1(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const Tile& tile = v.tiles[task.m];
  const auto [first, cols] = column_tile(stage_grid(v, Stage::kFc1), task.n);

  const MatrixView x{ctx.get<Tensor::kXRows>() + tile.first_row * v.hidden, v.hidden, 1};
  const bf16* w1 = ctx.get<Tensor::kW1>() + tile.expert * 2 * v.intermediate * v.hidden;
  const MatrixView gate_weights{w1 + first * v.hidden, 1, v.hidden};
  const MatrixView up_weights{w1 + (v.intermediate + first) * v.hidden, 1, v.hidden};

  float* gate = scratch.accumulators.reserve(static_cast<std::size_t>(2 * tile.rows * cols));
  float* up = gate + tile.rows * cols;
  gemm_tile(ctx.kernels, tile.rows, cols, v.hidden, x, gate_weights, gate, cols, scratch.packing);
  gemm_tile(ctx.kernels, tile.rows, cols, v.hidden, x, up_weights, up, cols, scratch.packing);

  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const std::int64_t row = tile.first_row + i;
    bf16* h = ctx.get<Tensor::kH>() + row * 2 * v.intermediate + first;
    ctx.kernels.swiglu(cols, gate + i * cols, up + i * cols, ctx.get<Tensor::kRowProbs>()[row], h,
                       h + v.intermediate, ctx.get<Tensor::kA>() + row * v.intermediate + first);
  }
}

// dx rows = dh w1, pushed. The first column tile also finishes the rows' dprobs, whose column
// groups dfc2 has left: every dfc2 tile of these rows is done when this task runs.
void dfc1(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const Tile& tile = v.tiles[task.m];
  const auto [first, cols] = column_tile(stage_grid(v, Stage::kDfc1), task.n);

  const MatrixView dh{ctx.get<Tensor::kDh>() + tile.first_row * 2 * v.intermediate,
                      2 * v.intermediate, 1};
  const MatrixView weights{
      ctx.get<Tensor::kW1>() + tile.expert * 2 * v.intermediate * v.hidden + first, v.hidden, 1};
  float* dx = scratch.accumulators.reserve(static_cast<std::size_t>(tile.rows * cols));
  gemm_tile(ctx.kernels, tile.rows, cols, 2 * v.intermediate, dh, weights, dx, cols,
            scratch.packing);
  push_rows(ctx, tile, first, cols, dx);
  if (task.n == 0) push_dprobs(ctx, tile);
}

}  // namespace uniep::cpu
