#include <algorithm>
#include <vector>

#include "cpu/stages.h"
#include "cpu/token_rows.h"
#include "cpu/token_sums.h"

namespace uniep::cpu {

namespace {

// The sum of a group whose experts are on another host, as it came from there.
void add_sum_from_afar(const PassContext& ctx, std::int64_t slot, float* sum) {
  const PassView& v = ctx.view;
  const Peer own = ctx.peer(v.rank);
  if (v.choice.fp32_sums) {
    ctx.kernels.add_f32_row(v.hidden, sum, own.get<Tensor::kSums>() + slot * v.hidden);
  } else {
    ctx.kernels.add_row(v.hidden, sum, own.get<Tensor::kCombine>() + slot * v.hidden);
  }
}

// sum = the sum of the token's routed rows, rounded, + that of its shared experts' rows, rounded.
void add_shared(const PassContext& ctx, std::int64_t token, Scratch& scratch, float* sum) {
  const PassView& v = ctx.view;
  const bool weighted = v.pass == Pass::kForward && v.probs == Probs::kAfter;
  const float* probs = weighted ? ctx.get<Tensor::kSharedProbs>() : nullptr;
  const bf16* rows =
      ctx.peer(v.rank).get<Tensor::kCombine>() + (token * v.slots + v.topk) * v.hidden;
  float* shared = sum + v.hidden;
  std::fill_n(shared, v.hidden, 0.0f);
  for (int s = 0; s < v.shared_experts; ++s) {
    const float* prob = probs == nullptr ? nullptr : probs + token * v.shared_experts + s;
    add_slot(ctx.kernels, v.hidden, rows + s * v.hidden, prob, shared);
  }
  std::vector<bf16>(&rounded)[2] = scratch.gathered;
  for (std::vector<bf16>& of_part : rounded) of_part.resize(static_cast<std::size_t>(v.hidden));
  ctx.kernels.round_row(v.hidden, sum, rounded[0].data());
  ctx.kernels.round_row(v.hidden, shared, rounded[1].data());
  std::fill_n(sum, v.hidden, -0.0f);  // which changes nothing that is added to it, not even a -0
  for (const std::vector<bf16>& of_part : rounded)
    ctx.kernels.add_row(v.hidden, sum, of_part.data());
}

// Sums of the token's groups, ascending.
void add_groups(const PassContext& ctx, std::int64_t token, Scratch& scratch, float* sum) {
  const PassView& v = ctx.view;
  float* part = sum + v.hidden;
  std::fill_n(sum, v.hidden, 0.0f);
  const TokenRows rows = token_rows(ctx, v.rank, token);
  const bool rounds = v.combine_partials == CombinePartials::kBf16;
  for_each_group(rows.ids, v.topk, v.group_experts, [&](ExpertRange group) {
    if (v.choice.sums_cross && !is_here(v, group)) {
      return add_sum_from_afar(ctx, token * v.topk + first_slot(rows.ids, group), sum);
    }
    add_rows(ctx, rows, group, part);
    add_partial(ctx.kernels, v.hidden, part, rounds, scratch.gathered[0], sum);
  });
}

void copy_dprobs(const PassContext& ctx, std::int64_t token) {
  const PassView& v = ctx.view;
  const float* pushed = ctx.peer(v.rank).get<Tensor::kDprobSlots>() + token * v.slots;
  for (int k = 0; k < v.topk; ++k) {
    const std::int64_t at = token * v.topk + k;
    ctx.get<Tensor::kDprobs>()[at] = v.topk_ids[at] < 0 ? 0.0f : pushed[k];
  }
  float* shared = ctx.get<Tensor::kDsharedProbs>();
  if (shared == nullptr) return;
  std::copy_n(pushed + v.topk, v.shared_experts, shared + token * v.shared_experts);
}

// out[t, k] or dx[t, k]: the sum of the row of slot k alone, 0 where it is dropped.
void add_slots(const PassContext& ctx, std::int64_t token, float* sum, bf16* out) {
  const PassView& v = ctx.view;
  const TokenRows rows = token_rows(ctx, v.rank, token);
  for (int k = 0; k < v.topk; ++k) {
    std::fill_n(sum, v.hidden, 0.0f);
    const bf16* row = rows.rows + k * v.hidden;
    if (rows.ids[k] >= 0) add_slot(ctx.kernels, v.hidden, row, nullptr, sum);
    ctx.kernels.round_row(v.hidden, sum, out + k * v.hidden);
  }
}

}  // namespace

// out[t] or dx[t]: the token's rows summed over k ascending, each times its probability in the
// forward pass where that enters behind fc2; with combine groups by group, then over groups. Behind
// it what its shared experts give. With slot_rows each slot has a sum of its own. dprobs copied.
void reduce(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const std::int64_t first = task.m * v.schedule.token_block;
  const std::int64_t end = min_of<std::int64_t>(first + v.schedule.token_block, v.tokens);
  const bool forward = v.pass == Pass::kForward;
  bf16* out = forward ? ctx.get<Tensor::kOut>() : ctx.get<Tensor::kDx>();
  float* sum = scratch.accumulators.reserve(static_cast<std::size_t>(2 * v.hidden));
  for (std::int64_t t = first; t < end; ++t) {
    if (!forward) copy_dprobs(ctx, t);
    if (v.slot_rows) {
      add_slots(ctx, t, sum, out + t * v.topk * v.hidden);
      continue;
    }
    if (v.group_experts > 0) {
      add_groups(ctx, t, scratch, sum);
    } else {
      add_rows(ctx, token_rows(ctx, v.rank, t), kAllExperts, sum);
    }
    if (v.shared_experts > 0) add_shared(ctx, t, scratch, sum);
    ctx.kernels.round_row(v.hidden, sum, out + t * v.hidden);
  }
}

}  // namespace uniep::cpu
