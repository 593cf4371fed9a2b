#include <algorithm>

#include "cpu/stages.h"

namespace uniep::cpu {

// out[t] or dx[t]: the token's rows summed over k ascending, each times its probability in the
// forward pass where that enters behind fc2; dprobs copied.
void reduce(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const std::int64_t first = task.m * v.schedule.token_block;
  const std::int64_t end = min_of<std::int64_t>(first + v.schedule.token_block, v.tokens);
  const Peer own = ctx.peer(v.rank);
  const bool forward = v.pass == Pass::kForward;
  const bool weighted = forward && v.probs == Probs::kAfter;
  bf16* out = forward ? ctx.get<Tensor::kOut>() : ctx.get<Tensor::kDx>();
  float* sum = scratch.accumulators.reserve(static_cast<std::size_t>(v.hidden));
  for (std::int64_t t = first; t < end; ++t) {
    std::fill_n(sum, v.hidden, 0.0f);
    for (int k = 0; k < v.topk; ++k) {
      const std::int64_t slot = t * v.topk + k;
      const bool dropped = v.topk_ids[slot] < 0;
      const bf16* row = own.get<Tensor::kCombine>() + slot * v.hidden;
      if (!dropped && weighted) {
        ctx.kernels.add_scaled_row(v.hidden, sum, row, ctx.get<Tensor::kTopkProbs>()[slot]);
      } else if (!dropped) {
        ctx.kernels.add_row(v.hidden, sum, row);
      }
      if (forward) continue;
      ctx.get<Tensor::kDprobs>()[slot] = dropped ? 0.0f : own.get<Tensor::kDprobSlots>()[slot];
    }
    ctx.kernels.round_row(v.hidden, sum, out + t * v.hidden);
  }
}

}  // namespace uniep::cpu
