#include <algorithm>

#include "cpu/stages.h"

namespace uniep::cpu {
namespace {

/// Writes sums of a call to dw, whose part they are from `offset` on: overwrites or adds.
void store(const Kernels& kernels, const WeightGrad& dw, std::int64_t offset, std::int64_t n,
           const float* sums) {
  if (const auto* overwritten = std::get_if<std::span<bf16>>(&dw)) {
    kernels.round_row(n, sums, overwritten->data() + offset);
  } else if (const auto* main_grad = std::get_if<std::span<float>>(&dw)) {
    kernels.add_f32_row(n, main_grad->data() + offset, sums);
  } else {
    kernels.add_bf16_row(n, std::get<Bf16MainGrad>(dw).data() + offset, sums);
  }
}

/// A main gradient of an expert without rows keeps what it holds, a -0 too.
bool is_kept(const WeightGrad& dw, std::int64_t rows) {
  return rows == 0 && !std::holds_alternative<std::span<bf16>>(dw);
}

/// Rows of the output that the task's tile has.
struct RowRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};
RowRange tile_rows(const PassView& v, const Task& task) {
  const std::int64_t first = task.m * v.schedule.tile_m;
  return {first, min_of<std::int64_t>(v.schedule.tile_m, stage_grid(v, task.stage).rows - first)};
}

/// One tile of left^T right, summed over an expert's rows in canonical order, into dw[expert].
/// `left` is [rows, grid.rows] at the expert's first row; `right(first, count)` is [rows, count]:
/// that many columns of the right operand, likewise.
template <class Right>
void wgrad_tile(const PassContext& ctx, const Task& task, Scratch& scratch, const bf16* left,
                const WeightGrad& dw, const Right& right) {
  const PassView& v = ctx.view;
  const StageGrid grid = stage_grid(v, task.stage);
  const std::int64_t rows = v.tokens_per_expert[task.expert];
  const auto [m0, m] = tile_rows(v, task);
  const auto [n0, n] = column_tile(grid, task.n);
  if (is_kept(dw, rows)) return;

  float* sums = scratch.accumulators.reserve(static_cast<std::size_t>(m * n));
  gemm_tile(ctx.kernels, m, n, rows, {left + m0, 1, grid.rows}, right(n0, n), sums, n,
            scratch.packing);
  for (std::int64_t i = 0; i < m; ++i) {
    const std::int64_t offset = (task.expert * grid.rows + m0 + i) * grid.cols + n0;
    store(ctx.kernels, dw, offset, n, sums + i * n);
  }
}

/// The bias gradient of the same output rows, by the task of the first columns: the sum of the
/// columns of `left` over the expert's rows, row i times factor(i), in the order of kBiasRows.
template <class Factor>
void bias_tile(const PassContext& ctx, const Task& task, Scratch& scratch, const bf16* left,
               const WeightGrad& db, const Factor& factor) {
  const PassView& v = ctx.view;
  if (task.n != 0 || !v.dropped.has_bias) return;
  const std::int64_t width = stage_grid(v, task.stage).rows;
  const std::int64_t rows = v.tokens_per_expert[task.expert];
  const auto [m0, m] = tile_rows(v, task);
  if (is_kept(db, rows)) return;

  float* sums = scratch.accumulators.reserve(static_cast<std::size_t>((1 + kBiasPartials) * m));
  float* partials = sums + m;
  std::fill_n(sums, m, 0.0f);
  for (std::int64_t first = 0; first < rows; first += kBiasRows) {
    std::fill_n(partials, kBiasPartials * m, 0.0f);
    for (int partial = 0; partial < kBiasPartials; ++partial) {
      for (int i = 0; i < kBiasRows / kBiasPartials; ++i) {
        const std::int64_t row = first + bias_row(partial, i);
        if (row >= rows) continue;
        ctx.kernels.add_scaled_row(m, partials + partial * m, left + row * width + m0, factor(row));
      }
    }
    for (std::int64_t j = 0; j < m; ++j) {
      sums[j] += (partials[j] + partials[m + j]) + (partials[2 * m + j] + partials[3 * m + j]);
    }
  }
  store(ctx.kernels, db, task.expert * width + m0, m, sums);
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

// dw2 = dy^T a; db2 = the sum of dy, each row times what b2 was multiplied by.
void wgrad2(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const std::int64_t row = v.segment_begin[task.expert];
  const bf16* dy = ctx.get<Tensor::kDyRows>() + row * v.hidden;
  const bf16* a = ctx.get<Tensor::kA>() + row * v.intermediate;
  wgrad_tile(ctx, task, scratch, dy, ctx.dw2, [&](std::int64_t first, std::int64_t) {
    return MatrixView{a + first, v.intermediate, 1};
  });
  bias_tile(ctx, task, scratch, dy, ctx.db2,
            [&](std::int64_t i) { return factor_of_da(v.probs, prob_of_row(ctx, row + i)); });
}

// dw1 = dh^T x; db1 = the sum of dh.
void wgrad1(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const bf16* dh = ctx.get<Tensor::kDh>() + v.segment_begin[task.expert] * v.h_width();
  wgrad_tile(ctx, task, scratch, dh, ctx.dw1, [&](std::int64_t first, std::int64_t count) {
    return columns_of_x(ctx, task, scratch, first, count);
  });
  bias_tile(ctx, task, scratch, dh, ctx.db1, [](std::int64_t) { return 1.0f; });
}

}  // namespace uniep::cpu
