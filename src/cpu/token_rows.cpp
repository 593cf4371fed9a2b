#include "cpu/token_rows.h"

#include <algorithm>

namespace uniep::cpu {

TokenRows token_rows(const PassContext& ctx, int source, std::int64_t token) {
  const PassView& v = ctx.view;
  const bool own = source == v.rank;
  const std::int64_t slot = token * v.topk;
  TokenRows found{.ids = own ? v.topk_ids + slot : v.ids_of(source, token),
                  .rows = ctx.peer(source).get<Tensor::kCombine>() + slot * v.hidden};
  if (v.pass == Pass::kForward && v.probs == Probs::kAfter) {
    found.probs =
        (own ? ctx.get<Tensor::kTopkProbs>() : ctx.peer(source).get<Tensor::kProbs>()) + slot;
  }
  return found;
}

void add_rows(const PassContext& ctx, const TokenRows& token, ExpertRange experts, float* sum) {
  const PassView& v = ctx.view;
  std::fill_n(sum, v.hidden, 0.0f);
  for (int k = 0; k < v.topk; ++k) {
    if (!experts.has(token.ids[k])) continue;
    const bf16* row = token.rows + k * v.hidden;
    if (token.probs != nullptr) {
      ctx.kernels.add_scaled_row(v.hidden, sum, row, token.probs[k]);
    } else {
      ctx.kernels.add_row(v.hidden, sum, row);
    }
  }
}

}  // namespace uniep::cpu
