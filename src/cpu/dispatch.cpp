#include <cstring>

#include "cpu/stages.h"
#include "schedule/received_tokens.h"

namespace uniep::cpu {
namespace {

void copy_token(const PassContext& ctx, bf16* to, const bf16* from) {
  std::memcpy(to, from, static_cast<std::size_t>(ctx.view.hidden) * sizeof(*to));
}

/// Calls write(to, token, row) for each row of the task's pulls: where it lies in tensor `tensor`,
/// `token_of` its pull, and its number.
template <Tensor tensor, class TokenOf, class Write>
void for_each_row(const PassContext& ctx, const Task& task, TokenOf&& token_of, Write&& write) {
  const PassView& v = ctx.view;
  bf16* rows = ctx.get<tensor>();
  for (std::int64_t i = task.first_pull(); i < task.end_pull(); ++i) {
    const Pull& pull = v.pulls[i];
    const bf16* token = token_of(pull);
    for (int c = 0; c < pull.num_rows; ++c) {
      const std::int64_t row = v.pull_rows[pull.first_row + c];
      write(rows + ctx.row<tensor>(row) * v.hidden, token, row);
    }
  }
}

/// Copies the tokens of the task's pulls, `token_of(pull)`, to all of their rows of tensor `to`.
template <Tensor to, class TokenOf>
void fill_rows(const PassContext& ctx, const Task& task, TokenOf&& token_of) {
  for_each_row<to>(ctx, task, token_of, [&](bf16* row, const bf16* token, std::int64_t) {
    copy_token(ctx, row, token);
  });
}

/// A pull's token among those that its rank has published as tensor `from`.
template <Tensor from>
const bf16* published(const PassContext& ctx, const Pull& pull) {
  return ctx.peer(pull.source).get<from>() + pull.token * ctx.view.hidden;
}

/// The rows of dy, each times its probability.
template <class TokenOf>
void weight_rows(const PassContext& ctx, const Task& task, TokenOf&& token_of) {
  for_each_row<Tensor::kDyRows>(
      ctx, task, token_of, [&](bf16* to, const bf16* token, std::int64_t row) {
        ctx.kernels.scale_row(ctx.view.hidden, token, factor_of_dy(prob_of_row(ctx, row)), to);
      });
}

/// Where a pull's token is kept.
bf16* received(const PassContext& ctx, const Pull& pull) {
  const std::int64_t place = received_place(ctx.view, received_token(ctx.view, pull));
  return ctx.get<Tensor::kReceived>() + place * kPlaceElements;
}

/// Keeps the tokens of the task's pulls, each once.
void keep_tokens(const PassContext& ctx, const Task& task) {
  const PassView& v = ctx.view;
  for (std::int64_t i = task.first_pull(); i < task.end_pull(); ++i) {
    const Pull& pull = v.pulls[i];
    if (!keeps_token(v, pull, received_token(v, pull))) continue;
    copy_token(ctx, received(ctx, pull), published<Tensor::kTokens>(ctx, pull));
  }
}

/// The probabilities of the task's rows.
void copy_probs(const PassContext& ctx, const Task& task) {
  const PassView& v = ctx.view;
  for (std::int64_t i = task.first_pull(); i < task.end_pull(); ++i) {
    const Pull& pull = v.pulls[i];
    const float* probs =
        ctx.peer(pull.source).get<Tensor::kProbs>() + std::int64_t{pull.token} * v.slots;
    for (int c = 0; c < pull.num_rows; ++c) {
      const std::int64_t row = v.pull_rows[pull.first_row + c];
      ctx.get<Tensor::kRowProbs>()[ctx.row<Tensor::kRowProbs>(row)] = probs[v.row_origin[row].slot];
    }
  }
}

}  // namespace

void dispatch(const PassContext& ctx, const Task& task) {
  const auto token_of = [&](const Pull& pull) { return published<Tensor::kTokens>(ctx, pull); };
  const bool backward = ctx.view.pass == Pass::kBackward;
  if (backward && ctx.view.probs == Probs::kAfter) return weight_rows(ctx, task, token_of);
  if (backward) return fill_rows<Tensor::kDyRows>(ctx, task, token_of);
  fill_rows<Tensor::kXRows>(ctx, task, token_of);
  copy_probs(ctx, task);
  if (keeps_received(ctx.view.choice)) keep_tokens(ctx, task);
}

void redispatch(const PassContext& ctx, const Task& task) {
  fill_rows<Tensor::kXRows>(
      ctx, task, [&](const Pull& pull) { return published<Tensor::kXTokens>(ctx, pull); });
}

// Of forward's tokens, and so without a peer.
void expand(const PassContext& ctx, const Task& task) {
  fill_rows<Tensor::kXRows>(ctx, task, [&](const Pull& pull) { return received(ctx, pull); });
}

}  // namespace uniep::cpu
