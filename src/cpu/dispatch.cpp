#include <cstring>

#include "cpu/stages.h"

namespace uniep::cpu {

void dispatch(const PassContext& ctx, const Task& task) {
  const PassView& v = ctx.view;
  const auto row_bytes = static_cast<std::size_t>(v.hidden) * sizeof(bf16);
  for (std::int64_t i = task.m; i < task.m + task.n; ++i) {
    const Pull& pull = v.pulls[i];
    const bf16* token = ctx.peers.tokens(pull.source) + pull.token * v.hidden;
    const float* probs = ctx.peers.probs(pull.source) + std::int64_t{pull.token} * v.topk;
    for (int c = 0; c < pull.num_rows; ++c) {
      const std::int64_t row = v.pull_rows[pull.first_row + c];
      std::memcpy(ctx.dispatched + row * v.hidden, token, row_bytes);
      if (v.pass == Pass::kForward) ctx.row_probs[row] = probs[v.row_origin[row].slot];
    }
  }
}

}  // namespace uniep::cpu
