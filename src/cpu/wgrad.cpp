#include <algorithm>

#include "cpu/stages.h"

namespace uniep::cpu {
namespace {

bool is_in_out(const WeightGrad& dw) {
  return with_matrices(dw, [](const auto& matrices) { return matrices.is_in_out(); });
}

/// `count` elements of an expert's gradient from one on: of its row, or where its matrices are [in,
/// out] of its column.
struct Line {
  std::int64_t expert = 0;
  std::int64_t row = 0;
  std::int64_t col = 0;
  std::int64_t count = 0;
};

/// write(count, to, sums) for elements that lie `stride` apart, by way of a copy.
template <class T, class Write>
void write_apart(std::int64_t count, T* to, std::int64_t stride, const float* sums,
                 const Write& write) {
  constexpr std::int64_t kAtATime = 64;
  T near[kAtATime];
  for (std::int64_t first = 0; first < count; first += kAtATime) {
    const std::int64_t n = std::min(kAtATime, count - first);
    T* const far = to + first * stride;
    for (std::int64_t i = 0; i < n; ++i) near[i] = far[i * stride];
    write(n, near, sums + first);
    for (std::int64_t i = 0; i < n; ++i) far[i * stride] = near[i];
  }
}

/// write(count, to, sums) for the pieces of the line that lie together.
template <class T, class Write>
void write_line(const ExpertMatrices<T>& matrices, const ExpertShape& shape, const Line& line,
                const float* sums, const Write& write) {
  const ExpertPlaces places(matrices, shape);
  if (!matrices.is_in_out()) {
    return write(line.count, places.element(line.expert, line.row, line.col), sums);
  }
  for (std::int64_t i = 0, count = 0; i < line.count; i += count) {
    const std::int64_t row = line.row + i;
    count = std::min(line.count - i, shape.rows - row % shape.rows);  // rows of one part
    T* const to = places.element(line.expert, row, line.col);
    if (places.row_stride() == 1) {
      write(count, to, sums + i);
    } else {
      write_apart(count, to, places.row_stride(), sums + i, write);
    }
  }
}

/// Writes sums of a call to their line of dw: overwrites or adds.
void store(const Kernels& kernels, const WeightGrad& dw, const ExpertShape& shape, const Line& line,
           const float* sums) {
  if (const auto* overwritten = std::get_if<ExpertMatrices<bf16>>(&dw)) {
    write_line(*overwritten, shape, line, sums, [&](std::int64_t n, bf16* to, const float* from) {
      kernels.round_row(n, from, to);
    });
  } else if (const auto* main_grad = std::get_if<ExpertMatrices<float>>(&dw)) {
    write_line(*main_grad, shape, line, sums, kernels.add_f32_row);
  } else {
    write_line(std::get<Bf16MainGrad>(dw).values, shape, line, sums, kernels.add_bf16_row);
  }
}

/// A main gradient of an expert without rows keeps what it holds, a -0 too.
bool is_kept(const WeightGrad& dw, std::int64_t rows) { return rows == 0 && !is_overwritten(dw); }

/// Rows of the output that the task's tile has.
struct RowRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};
RowRange tile_rows(const PassView& v, const Task& task) {
  const std::int64_t first = task.m * v.schedule.tile_m;
  return {first, min_of<std::int64_t>(v.schedule.tile_m, stage_grid(v, task.stage).rows - first)};
}

/// Whether the rows of an expert follow one another in the tensor: not in pages of a row pool, nor
/// across the end of a ring.
template <Tensor t>
bool lie_together(const PassView& v, int expert) {
  const std::int64_t rows = v.tokens_per_expert[expert];
  if (is_saved<t>(v)) return v.pages == nullptr;
  return v.ring_rows == 0 || ring_row(v, v.segment_begin[expert]) + rows <= v.ring_rows;
}

/// Columns [first, first + count) of all rows of the task's expert in the tensor, [rows, `width`].
/// Where the rows do not lie together they are gathered.
template <Tensor t>
MatrixView columns_of(const PassContext& ctx, const Task& task, std::int64_t width,
                      const ColumnRange& columns, std::vector<bf16>& gathered) {
  const PassView& v = ctx.view;
  const auto [first, count] = columns;
  const std::int64_t row = v.segment_begin[task.expert];
  const std::int64_t rows = v.tokens_per_expert[task.expert];
  if constexpr (kTokensOf<t> != Tensor::kNone) {
    if (is_in_place<t>(v, task.expert)) return {ctx.get<kTokensOf<t>>() + first, width, 1};
  }
  const bf16* from = ctx.get<t>() + first;
  if (rows == 0) return {from, width, 1};
  if (lie_together<t>(v, task.expert)) return {from + ctx.row<t>(row) * width, width, 1};
  gathered.resize(static_cast<std::size_t>(rows * count));
  for (std::int64_t i = 0; i < rows; ++i) {
    std::copy_n(from + ctx.row<t>(row + i) * width, count, gathered.data() + i * count);
  }
  return {gathered.data(), count, 1};
}

/// The gradients of the weights of all experts of this rank.
struct ExpertGrads {
  const WeightGrad& routed;
  const WeightGrad& shared;
};
/// That of an expert, and its place there.
struct ExpertGrad {
  const WeightGrad& dw;
  std::int64_t index = 0;
};
ExpertGrad grad_of(const PassView& v, const ExpertGrads& grads, int expert) {
  if (v.is_shared(expert)) return {grads.shared, expert - v.routed_experts()};
  return {grads.routed, expert};
}

MatrixView transposed(const MatrixView& m) { return {m.data, m.col_stride, m.row_stride}; }

/// One tile of left^T right, summed over an expert's rows in canonical order, into dw[expert].
/// Where dw is [in, out] the tile is right^T left: the same products and sums, in lines as dw has
/// them.
template <Tensor left, Tensor right>
void wgrad_tile(const PassContext& ctx, const Task& task, Scratch& scratch,
                const ExpertGrads& grads, const ExpertShape& shape) {
  const PassView& v = ctx.view;
  const auto [dw, index] = grad_of(v, grads, task.expert);
  const StageGrid grid = stage_grid(v, task.stage);
  const std::int64_t rows = v.tokens_per_expert[task.expert];
  const auto [m0, m] = tile_rows(v, task);
  const auto [n0, n] = column_tile(grid, task.n);
  if (is_kept(dw, rows)) return;

  const MatrixView a = columns_of<left>(ctx, task, grid.rows, {m0, m}, scratch.gathered[0]);
  const MatrixView b = columns_of<right>(ctx, task, grid.cols, {n0, n}, scratch.gathered[1]);
  float* sums = scratch.accumulators.reserve(static_cast<std::size_t>(m * n));
  if (is_in_out(dw)) {
    gemm_tile(ctx.kernels, n, m, rows, transposed(b), a, sums, m, scratch.packing);
    for (std::int64_t i = 0; i < n; ++i) {
      store(ctx.kernels, dw, shape, {index, m0, n0 + i, m}, sums + i * m);
    }
    return;
  }
  gemm_tile(ctx.kernels, m, n, rows, transposed(a), b, sums, n, scratch.packing);
  for (std::int64_t i = 0; i < m; ++i) {
    store(ctx.kernels, dw, shape, {index, m0 + i, n0, n}, sums + i * n);
  }
}

/// The bias gradient of the same output rows, by the task of the first columns: the sum of the
/// columns of `left` over the expert's rows, row i times factor(i), in the order of kBiasRows.
template <Tensor left, class Factor>
void bias_tile(const PassContext& ctx, const Task& task, Scratch& scratch, const WeightGrad& db,
               const Factor& factor) {
  const PassView& v = ctx.view;
  if (task.n != 0 || !v.choice.has_bias) return;
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
        const std::int64_t at = ctx.row<left>(v.segment_begin[task.expert] + row);
        ctx.kernels.add_scaled_row(m, partials + partial * m, ctx.get<left>() + at * width + m0,
                                   factor(row));
      }
    }
    for (std::int64_t j = 0; j < m; ++j) {
      sums[j] += (partials[j] + partials[m + j]) + (partials[2 * m + j] + partials[3 * m + j]);
    }
  }
  const ExpertShape shape{v.num_local_experts, 1, 1, width};
  store(ctx.kernels, db, shape, {task.expert, 0, m0, m}, sums);
}

}  // namespace

// dw2 = dy^T a; db2 = the sum of dy, each row times what b2 was multiplied by.
void wgrad2(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const std::int64_t row = v.segment_begin[task.expert];
  wgrad_tile<Tensor::kDyRows, Tensor::kA>(ctx, task, scratch, {ctx.dw2, ctx.dshared_w2},
                                          shape_of_w2(v, v.num_local_experts));
  bias_tile<Tensor::kDyRows>(ctx, task, scratch, ctx.db2, [&](std::int64_t i) {
    return factor_of_da(v.probs, prob_of_row(ctx, row + i));
  });
}

// dw1 = dh^T x; db1 = the sum of dh.
void wgrad1(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  wgrad_tile<Tensor::kDh, Tensor::kXRows>(ctx, task, scratch, {ctx.dw1, ctx.dshared_w1},
                                          shape_of_w1(v, v.num_local_experts, v.halves()));
  bias_tile<Tensor::kDh>(ctx, task, scratch, ctx.db1, [](std::int64_t) { return 1.0f; });
}

}  // namespace uniep::cpu
