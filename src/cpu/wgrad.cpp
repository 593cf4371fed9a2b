#include "cpu/stages.h"

namespace uniep::cpu {
namespace {

/// One tile of left^T right, summed over an expert's rows in canonical order, into dw[expert].
/// `left` is [rows, grid.rows], `right` is [rows, grid.cols], both at the expert's first row.
void wgrad_tile(const PassContext& ctx, const Task& task, Scratch& scratch, const bf16* left,
                const bf16* right, const WeightGrad& dw) {
  const PassView& v = ctx.view;
  const StageGrid grid = stage_grid(v, task.stage);
  const std::int64_t rows = v.tokens_per_expert[task.expert];
  const std::int64_t m0 = task.m * v.schedule.tile_m;
  const std::int64_t m = min_of<std::int64_t>(v.schedule.tile_m, grid.rows - m0);
  const auto [n0, n] = column_tile(grid, task.n);

  const auto* overwritten = std::get_if<std::span<bf16>>(&dw);
  if (overwritten == nullptr && rows == 0) return;  // keeps what it holds, a -0 too

  float* sums = scratch.accumulators.reserve(static_cast<std::size_t>(m * n));
  gemm_tile(ctx.kernels, m, n, rows, {left + m0, 1, grid.rows}, {right + n0, grid.cols, 1}, sums, n,
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

}  // namespace

// dw2 = dy^T a
void wgrad2(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const std::int64_t row = ctx.view.segment_begin[task.expert];
  wgrad_tile(ctx, task, scratch, ctx.get<Tensor::kDyRows>() + row * ctx.view.hidden,
             ctx.get<Tensor::kA>() + row * ctx.view.intermediate, ctx.dw2);
}

// dw1 = dh^T x
void wgrad1(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const std::int64_t row = ctx.view.segment_begin[task.expert];
  wgrad_tile(ctx, task, scratch, ctx.get<Tensor::kDh>() + row * 2 * ctx.view.intermediate,
             ctx.get<Tensor::kXRows>() + row * ctx.view.hidden, ctx.dw1);
}

}  // namespace uniep::cpu
