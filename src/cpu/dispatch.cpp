#include <cstring>

#include "cpu/stages.h"

namespace uniep::cpu {

void dispatch(const PassContext& ctx, const Task& task) {
  const PassView& v = ctx.view;
  const bool forward = v.pass == Pass::kForward;
  bf16* rows = forward ? ctx.get<Tensor::kXRows>() : ctx.get<Tensor::kDyRows>();
  const auto row_bytes = static_cast<std::size_t>(v.hidden) * sizeof(*rows);
  for (std::int64_t i = task.m; i < task.m + task.n; ++i) {
    const Pull& pull = v.pulls[i];
    const Peer source = ctx.peer(pull.source);
    const bf16* token = source.get<Tensor::kTokens>() + pull.token * v.hidden;
    const float* probs = source.get<Tensor::kProbs>() + std::int64_t{pull.token} * v.topk;
    for (int c = 0; c < pull.num_rows; ++c) {
      const std::int64_t row = v.pull_rows[pull.first_row + c];
      std::memcpy(rows + row * v.hidden, token, row_bytes);
      if (forward) ctx.get<Tensor::kRowProbs>()[row] = probs[v.row_origin[row].slot];
    }
  }
}

}  // namespace uniep::cpu
