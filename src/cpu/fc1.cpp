// The GEMMs with w1: fc1 with SwiGLU in its epilogue, refc1 without it, and fc1's data gradient
// dfc1 with the push.
#include "cpu/stages.h"

namespace uniep::cpu {

namespace {

/// A tile's fp32 sums of gate and of up columns, [tile.rows, cols] each.
struct GateAndUp {
  float* gate;
  float* up;
};

/// x w1^T for the gate columns [first, first + cols) and the same up columns, in accumulators of
/// `scratch`, which has `more` floats behind them.
GateAndUp multiply_both(const PassContext& ctx, const Tile& tile, const ColumnRange& columns,
                        Scratch& scratch, std::int64_t more = 0) {
  const PassView& v = ctx.view;
  const auto [first, cols] = columns;
  const MatrixView x{ctx.get<Tensor::kXRows>() + ctx.row<Tensor::kXRows>(tile.first_row) * v.hidden,
                     v.hidden, 1};
  const bf16* w1 = ctx.get<Tensor::kW1>() + tile.expert * 2 * v.intermediate * v.hidden;
  const MatrixView gate_weights{w1 + first * v.hidden, 1, v.hidden};
  const MatrixView up_weights{w1 + (v.intermediate + first) * v.hidden, 1, v.hidden};

  float* gate = scratch.accumulators.reserve(static_cast<std::size_t>(2 * tile.rows * cols + more));
  float* up = gate + tile.rows * cols;
  gemm_tile(ctx.kernels, tile.rows, cols, v.hidden, x, gate_weights, gate, cols, scratch.packing);
  gemm_tile(ctx.kernels, tile.rows, cols, v.hidden, x, up_weights, up, cols, scratch.packing);
  return {gate, up};
}

}  // namespace

// h = x w1^T; a from both of its halves. Where h is not kept, each row of it is overwritten by the
// next.
void fc1(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const Tile& tile = v.tiles[task.m];
  const ColumnRange columns = column_tile(stage_grid(v, Stage::kFc1), task.n);
  const auto [first, cols] = columns;
  const bool keeps_h = !v.dropped.h;
  const auto [gate, up] = multiply_both(ctx, tile, columns, scratch, keeps_h ? 0 : cols);
  bf16* row_of_h = reinterpret_cast<bf16*>(up + tile.rows * cols);
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const std::int64_t row = tile.first_row + i;
    bf16* h = keeps_h
                  ? ctx.get<Tensor::kH>() + ctx.row<Tensor::kH>(row) * 2 * v.intermediate + first
                  : row_of_h;
    const float prob = ctx.get<Tensor::kRowProbs>()[ctx.row<Tensor::kRowProbs>(row)];
    ctx.kernels.swiglu(cols, gate + i * cols, up + i * cols, prob, h,
                       h + (keeps_h ? v.intermediate : cols),
                       ctx.get<Tensor::kA>() + row * v.intermediate + first);
  }
}

// h once more.
void refc1(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const Tile& tile = v.tiles[task.m];
  const ColumnRange columns = column_tile(stage_grid(v, Stage::kRefc1), task.n);
  const auto [first, cols] = columns;
  const auto [gate, up] = multiply_both(ctx, tile, columns, scratch);
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const std::int64_t row = ctx.row<Tensor::kH>(tile.first_row + i);
    bf16* h = ctx.get<Tensor::kH>() + row * 2 * v.intermediate + first;
    ctx.kernels.round_row(cols, gate + i * cols, h);
    ctx.kernels.round_row(cols, up + i * cols, h + v.intermediate);
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
