// The GEMMs with w1: fc1 with the activation in its epilogue, refc1 without it, and fc1's data
// gradient dfc1 with the push.
#include "cpu/stages.h"

namespace uniep::cpu {

namespace {

/// A tile's fp32 sums of gate and of up columns, [tile.rows, cols] each; without a gate, of all
/// columns and null.
struct GateAndUp {
  float* gate;
  float* up;
};

/// x w1^T for the columns [first, first + cols) of each half, rounded and with b1 added where there
/// are biases, in accumulators of `scratch`, which has `more` floats behind them.
GateAndUp multiply_halves(const PassContext& ctx, const Tile& tile, const ColumnRange& columns,
                          Scratch& scratch, std::int64_t more = 0) {
  const PassView& v = ctx.view;
  const auto [first, cols] = columns;
  const std::int64_t size = tile.rows * cols;
  const MatrixView x{ctx.operand_row<Tensor::kXRows>(tile.expert, tile.first_row), v.hidden, 1};
  float* sums = scratch.accumulators.reserve(static_cast<std::size_t>(v.halves() * size + more));
  const ExpertWeight w1 = ctx.w1(tile.expert);
  for (int half = 0; half < v.halves(); ++half) {
    const MatrixView weights = w1.to_outputs(half, first);
    float* of_half = sums + half * size;
    gemm_tile(ctx.kernels, tile.rows, cols, v.hidden, x, weights, of_half, cols, scratch.packing);
    if (!v.choice.has_bias) continue;
    const std::int64_t column = tile.expert * v.h_width() + half * v.intermediate + first;
    const bf16* b1 = ctx.get<Tensor::kB1>() + column;
    for (std::int64_t i = 0; i < tile.rows; ++i) {
      ctx.kernels.add_bias_row(cols, of_half + i * cols, b1, 1);
    }
  }
  return {sums, v.halves() == 2 ? sums + size : nullptr};
}

/// Element `offset` of memory that may not be there.
template <class T>
T* at(T* memory, std::int64_t offset) {
  return memory == nullptr ? nullptr : memory + offset;
}

}  // namespace

// h = x w1^T; a from its halves. Where h is not kept, each row of it is overwritten by the next.
void fc1(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const Tile& tile = v.tiles[task.m];
  const ColumnRange columns = column_tile(stage_grid(v, Stage::kFc1), task.n);
  const auto [first, cols] = columns;
  const bool keeps_h = !v.choice.drops_h;
  const auto [gate, up] = multiply_halves(ctx, tile, columns, scratch, keeps_h ? 0 : cols);
  bf16* row_of_h = reinterpret_cast<bf16*>(gate + v.halves() * tile.rows * cols);
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const std::int64_t row = tile.first_row + i;
    const float factor = factor_of_a(v.probs, prob_of_row(ctx, row));
    bf16* h =
        keeps_h ? ctx.get<Tensor::kH>() + ctx.row<Tensor::kH>(row) * v.h_width() + first : row_of_h;
    ctx.kernels.of(v.activation)
        .forward(cols, gate + i * cols, at(up, i * cols), factor, h,
                 h + (keeps_h ? v.intermediate : cols),
                 ctx.get<Tensor::kA>() + ctx.row<Tensor::kA>(row) * v.intermediate + first);
  }
}

// h once more.
void refc1(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const Tile& tile = v.tiles[task.m];
  const ColumnRange columns = column_tile(stage_grid(v, Stage::kRefc1), task.n);
  const auto [first, cols] = columns;
  const auto [gate, up] = multiply_halves(ctx, tile, columns, scratch);
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const std::int64_t row = ctx.row<Tensor::kH>(tile.first_row + i);
    bf16* h = ctx.get<Tensor::kH>() + row * v.h_width() + first;
    ctx.kernels.round_row(cols, gate + i * cols, h);
    if (up != nullptr) ctx.kernels.round_row(cols, up + i * cols, h + v.intermediate);
  }
}

// dx rows = dh w1, pushed. The first column tile also finishes the rows' dprobs, whose column
// groups dfc2 has left: every dfc2 tile of these rows is done when this task runs.
void dfc1(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const Tile& tile = v.tiles[task.m];
  const auto [first, cols] = column_tile(stage_grid(v, Stage::kDfc1), task.n);

  const std::int64_t width = v.h_width();
  const bf16* dh = ctx.get<Tensor::kDh>() + ctx.row<Tensor::kDh>(tile.first_row) * width;
  float* dx = scratch.accumulators.reserve(static_cast<std::size_t>(tile.rows * cols));
  // One sum over all of h, wherever its halves' weights lie.
  const ExpertWeight w1 = ctx.w1(tile.expert);
  const int pieces = w1.is_joined() ? 1 : v.halves();
  for (int piece = 0; piece < pieces; ++piece) {
    const std::int64_t rows = width / pieces;
    const MatrixView left{dh + piece * rows, width, 1};
    gemm_tile(ctx.kernels, tile.rows, cols, rows, left, w1.to_inputs(piece, first), dx, cols,
              scratch.packing, piece > 0);
  }
  push_rows(ctx, tile, first, cols, dx);
  if (task.n == 0) push_dprobs(ctx, tile);
}

}  // namespace uniep::cpu
