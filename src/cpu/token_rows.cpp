#include "cpu/token_rows.h"

#include <algorithm>

namespace uniep::cpu {

TokenRows token_rows(const PassContext& ctx, int source, std::int64_t token) {
  const PassView& v = ctx.view;
  const bool own = source == v.rank;
  const Peer peer = ctx.peer(source);
  TokenRows found{.ids = own ? v.topk_ids + token * v.topk : v.ids_of(source, token),
                  .rows = peer.get<Tensor::kCombine>() + token * v.slots * v.hidden};
  if (v.pass == Pass::kForward && v.probs == Probs::kAfter) {
    found.probs = own ? ctx.get<Tensor::kTopkProbs>() + token * v.topk
                      : peer.get<Tensor::kProbs>() + token * v.slots;
  }
  return found;
}

void add_slot(const PassContext& ctx, const bf16* row, const float* prob, float* sum) {
  if (prob != nullptr) {
    ctx.kernels.add_scaled_row(ctx.view.hidden, sum, row, *prob);
  } else {
    ctx.kernels.add_row(ctx.view.hidden, sum, row);
  }
}

void add_rows(const PassContext& ctx, const TokenRows& token, ExpertRange experts, float* sum) {
  const PassView& v = ctx.view;
  std::fill_n(sum, v.hidden, 0.0f);
  for (int k = 0; k < v.topk; ++k) {
    if (!experts.has(token.ids[k])) continue;
    add_slot(ctx, token.rows + k * v.hidden, token.probs == nullptr ? nullptr : token.probs + k,
             sum);
  }
}

}  // namespace uniep::cpu
