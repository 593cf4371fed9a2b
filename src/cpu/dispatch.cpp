#include <cstring>

#include "cpu/stages.h"

namespace uniep::cpu {
namespace {

/// Calls copy(token, row, number) for each row of the task's pulls, with what its token's rank has
/// published as tensor `from`, and where the row lies.
template <Tensor from, class Copy>
void for_each_row(const PassContext& ctx, const Task& task, bf16* rows, const Copy& copy) {
  const PassView& v = ctx.view;
  for (std::int64_t i = task.m; i < task.m + task.n; ++i) {
    const Pull& pull = v.pulls[i];
    const bf16* token = ctx.peer(pull.source).get<from>() + pull.token * v.hidden;
    for (int c = 0; c < pull.num_rows; ++c) {
      const std::int64_t row = v.pull_rows[pull.first_row + c];
      copy(token, rows + row * v.hidden, row);
    }
  }
}

template <Tensor from>
void copy_tokens(const PassContext& ctx, const Task& task, bf16* rows) {
  const auto row_bytes = static_cast<std::size_t>(ctx.view.hidden) * sizeof(*rows);
  for_each_row<from>(ctx, task, rows, [&](const bf16* token, bf16* row, std::int64_t) {
    std::memcpy(row, token, row_bytes);
  });
}

/// The rows of dy, each times its probability.
void weight_tokens(const PassContext& ctx, const Task& task, bf16* rows) {
  for_each_row<Tensor::kTokens>(
      ctx, task, rows, [&](const bf16* token, bf16* row, std::int64_t number) {
        const float factor = factor_of_dy(ctx.get<Tensor::kRowProbs>()[number]);
        ctx.kernels.scale_row(ctx.view.hidden, token, factor, row);
      });
}

/// The probabilities of the task's rows.
void copy_probs(const PassContext& ctx, const Task& task) {
  const PassView& v = ctx.view;
  for (std::int64_t i = task.m; i < task.m + task.n; ++i) {
    const Pull& pull = v.pulls[i];
    const float* probs =
        ctx.peer(pull.source).get<Tensor::kProbs>() + std::int64_t{pull.token} * v.topk;
    for (int c = 0; c < pull.num_rows; ++c) {
      const std::int64_t row = v.pull_rows[pull.first_row + c];
      ctx.get<Tensor::kRowProbs>()[row] = probs[v.row_origin[row].slot];
    }
  }
}

}  // namespace

void dispatch(const PassContext& ctx, const Task& task) {
  if (ctx.view.pass == Pass::kForward) {
    copy_tokens<Tensor::kTokens>(ctx, task, ctx.get<Tensor::kXRows>());
    copy_probs(ctx, task);
  } else if (ctx.view.probs == Probs::kAfter) {
    weight_tokens(ctx, task, ctx.get<Tensor::kDyRows>());
  } else {
    copy_tokens<Tensor::kTokens>(ctx, task, ctx.get<Tensor::kDyRows>());
  }
}

void redispatch(const PassContext& ctx, const Task& task) {
  copy_tokens<Tensor::kXTokens>(ctx, task, ctx.get<Tensor::kXRows>());
}

}  // namespace uniep::cpu
