// The GEMMs with w2: fc2 with the push, and its data gradient dfc2 with the activation's derivative
// in its epilogue.
#include "cpu/stages.h"

namespace uniep::cpu {

namespace {

/// b2 times the row's probability where that multiplies a, and so all of the row behind fc2.
void add_b2(const PassContext& ctx, const Tile& tile, const ColumnRange& columns, float* y) {
  const PassView& v = ctx.view;
  const auto [first, cols] = columns;
  const bf16* b2 = ctx.get<Tensor::kB2>() + tile.expert * v.hidden + first;
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const float factor = factor_of_a(v.probs, prob_of_row(ctx, tile.first_row + i));
    ctx.kernels.add_bias_row(cols, y + i * cols, b2, factor);
  }
}

/// Behind the groups of the rows' dprobs one more: the sum over the columns of dy b2.
void add_group_of_b2(const PassContext& ctx, const Tile& tile) {
  const PassView& v = ctx.view;
  const bf16* b2 = ctx.get<Tensor::kB2>() + tile.expert * v.hidden;
  for (std::int64_t row = tile.first_row; row < tile.first_row + tile.rows; ++row) {
    groups_of_row(ctx, row)[dprob_groups(v.intermediate)] = ctx.kernels.dot_row(
        v.hidden, ctx.get<Tensor::kDyRows>() + ctx.row<Tensor::kDyRows>(row) * v.hidden, b2);
  }
}

}  // namespace

// y = a w2^T, pushed.
void fc2(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const Tile& tile = v.tiles[task.m];
  const ColumnRange columns = column_tile(stage_grid(v, Stage::kFc2), task.n);
  const auto [first, cols] = columns;

  const MatrixView a{ctx.get<Tensor::kA>() + ctx.row<Tensor::kA>(tile.first_row) * v.intermediate,
                     v.intermediate, 1};
  const MatrixView weights = ctx.w2(tile.expert).to_outputs(0, first);
  float* y = scratch.accumulators.reserve(static_cast<std::size_t>(tile.rows * cols));
  gemm_tile(ctx.kernels, tile.rows, cols, v.intermediate, a, weights, y, cols, scratch.packing);
  if (v.choice.has_bias) add_b2(ctx, tile, columns, y);
  push_rows(ctx, tile, first, cols, y);
}

// da = dy w2, and from it dh, the column groups of dprobs, and a once more (for wgrad2).
void dfc2(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const Tile& tile = v.tiles[task.m];
  const auto [first, cols] = column_tile(stage_grid(v, Stage::kDfc2), task.n);

  const MatrixView dy{ctx.operand_row<Tensor::kDyRows>(tile.expert, tile.first_row), v.hidden, 1};
  const MatrixView weights = ctx.w2(tile.expert).to_inputs(0, first);
  float* da = scratch.accumulators.reserve(static_cast<std::size_t>(tile.rows * cols));
  gemm_tile(ctx.kernels, tile.rows, cols, v.hidden, dy, weights, da, cols, scratch.packing);

  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const std::int64_t row = tile.first_row + i;
    const bf16* h = ctx.get<Tensor::kH>() + ctx.row<Tensor::kH>(row) * v.h_width() + first;
    bf16* dh = ctx.get<Tensor::kDh>() + ctx.row<Tensor::kDh>(row) * v.h_width() + first;
    bf16* a = ctx.get<Tensor::kA>() + ctx.row<Tensor::kA>(row) * v.intermediate + first;
    const float prob = prob_of_row(ctx, row);
    ctx.kernels.of(v.activation)
        .backward(cols, da + i * cols, h, h + v.intermediate, factor_of_da(v.probs, prob), dh,
                  dh + v.intermediate, a, groups_of_row(ctx, row) + first / kDprobGroup);
  }
  if (task.n == 0 && v.choice.has_bias) add_group_of_b2(ctx, tile);
}

}  // namespace uniep::cpu
