#include "cpu/token_rows.h"

#include <algorithm>

#include "cpu/token_sums.h"

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

void add_rows(const PassContext& ctx, const TokenRows& token, ExpertRange experts, float* sum) {
  const PassView& v = ctx.view;
  std::fill_n(sum, v.hidden, 0.0f);
  for (int k = 0; k < v.topk; ++k) {
    if (!experts.has(token.ids[k])) continue;
    const float* prob = token.probs == nullptr ? nullptr : token.probs + k;
    add_slot(ctx.kernels, v.hidden, token.rows + k * v.hidden, prob, sum);
  }
}

}  // namespace uniep::cpu
