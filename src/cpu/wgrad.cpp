#include <algorithm>

#include "cpu/stages.h"

namespace uniep::cpu {
namespace {

/// One tile of left^T right, summed over an expert's rows in canonical order, into dw[expert].
/// `left` is [rows, grid.rows] at the expert's first row; `right(first, count)` is [rows, count]:
/// that many columns of the right operand, likewise.
template <class Right>
void wgrad_tile(const PassContext& ctx, const Task& task, Scratch& scratch, const bf16* left,
                const WeightGrad& dw, const Right& right) {
  const PassView& v = ctx.view;
  const StageGrid grid = stage_grid(v, task.stage);
  const std::int64_t rows = v.tokens_per_expert[task.expert];
  const std::int64_t m0 = task.m * v.schedule.tile_m;
  const std::int64_t m = min_of<std::int64_t>(v.schedule.tile_m, grid.rows - m0);
  const auto [n0, n] = column_tile(grid, task.n);

  const auto* overwritten = std::get_if<std::span<bf16>>(&dw);
  if (overwritten == nullptr && rows == 0) return;  // keeps what it holds, a -0 too

  float* sums = scratch.accumulators.reserve(static_cast<std::size_t>(m * n));
  gemm_tile(ctx.kernels, m, n, rows, {left + m0, 1, grid.rows}, right(n0, n), sums, n,
            scratch.packing);
  for (std::int64_t i = 0; i < m; ++i) {
    const std::int64_t offset = (task.expert * grid.rows + m0 + i) * grid.cols + n0;
    if (overwritten != nullptr) {
      ctx.kernels.round_row(n, sums + i * n, overwritten->data() + offset);
    } else if (const auto* main_grad = std::get_if<std::span<float>>(&dw)) {
      ctx.kernels.add_f32_row(n, main_grad->data() + offset, sums + i * n);
    } else {
      ctx.kernels.add_bf16_row(n, std::get<Bf16MainGrad>(dw).data() + offset, sums + i * n);
    }
  }
}

/// Columns of x of all rows of an expert, which may lie in several pages of a row pool.
MatrixView columns_of_x(const PassContext& ctx, const Task& task, Scratch& scratch,
                        std::int64_t first, std::int64_t count) {
  const PassView& v = ctx.view;
  const bf16* x = ctx.get<Tensor::kXRows>() + first;
  const std::int64_t row = v.segment_begin[task.expert];
  const std::int64_t rows = v.tokens_per_expert[task.expert];
  if (v.pages == nullptr || !is_saved<Tensor::kXRows>(v)) return {x + row * v.hidden, v.hidden, 1};
  scratch.gathered.resize(static_cast<std::size_t>(rows * count));
  for (std::int64_t i = 0; i < rows; ++i) {
    std::copy_n(x + ctx.row<Tensor::kXRows>(row + i) * v.hidden, count,
                scratch.gathered.data() + i * count);
  }
  return {scratch.gathered.data(), count, 1};
}

}  // namespace

// dw2 = dy^T a
void wgrad2(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const std::int64_t row = v.segment_begin[task.expert];
  const bf16* a = ctx.get<Tensor::kA>() + row * v.intermediate;
  wgrad_tile(ctx, task, scratch, ctx.get<Tensor::kDyRows>() + row * v.hidden, ctx.dw2,
             [&](std::int64_t first, std::int64_t) {
               return MatrixView{a + first, v.intermediate, 1};
             });
}

// dw1 = dh^T x
void wgrad1(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const std::int64_t row = ctx.view.segment_begin[task.expert];
  wgrad_tile(ctx, task, scratch, ctx.get<Tensor::kDh>() + row * 2 * ctx.view.intermediate, ctx.dw1,
             [&](std::int64_t first, std::int64_t count) {
               return columns_of_x(ctx, task, scratch, first, count);
             });
}

}  // namespace uniep::cpu
