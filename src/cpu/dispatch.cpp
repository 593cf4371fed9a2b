#include <cstring>

#include "cpu/stages.h"

namespace uniep::cpu {
namespace {

/// Copies the tokens of the task's pulls from what their ranks have published as tensor `from` to
/// all of their rows of tensor `to`.
template <Tensor from, Tensor to>
void copy_tokens(const PassContext& ctx, const Task& task) {
  const PassView& v = ctx.view;
  bf16* rows = ctx.get<to>();
  const auto row_bytes = static_cast<std::size_t>(v.hidden) * sizeof(*rows);
  for (std::int64_t i = task.m; i < task.m + task.n; ++i) {
    const Pull& pull = v.pulls[i];
    const bf16* token = ctx.peer(pull.source).get<from>() + pull.token * v.hidden;
    for (int c = 0; c < pull.num_rows; ++c) {
      const std::int64_t row = v.pull_rows[pull.first_row + c];
      std::memcpy(rows + ctx.row<to>(row) * v.hidden, token, row_bytes);
    }
  }
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
      ctx.get<Tensor::kRowProbs>()[ctx.row<Tensor::kRowProbs>(row)] = probs[v.row_origin[row].slot];
    }
  }
}

}  // namespace

void dispatch(const PassContext& ctx, const Task& task) {
  if (ctx.view.pass == Pass::kBackward) {
    return copy_tokens<Tensor::kTokens, Tensor::kDyRows>(ctx, task);
  }
  copy_tokens<Tensor::kTokens, Tensor::kXRows>(ctx, task);
  copy_probs(ctx, task);
}

void redispatch(const PassContext& ctx, const Task& task) {
  copy_tokens<Tensor::kXTokens, Tensor::kXRows>(ctx, task);
}

}  // namespace uniep::cpu
