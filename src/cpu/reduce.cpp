#include <algorithm>
#include <limits>

#include "base/contract.h"
#include "cpu/stages.h"
#include "cpu/token_rows.h"

namespace uniep::cpu {

namespace {

constexpr ExpertRange kAllExperts{0, std::numeric_limits<std::int32_t>::max()};

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

// Sums of the token's groups, ascending.
void add_groups(const PassContext& ctx, std::int64_t token, Scratch& scratch, float* sum) {
  const PassView& v = ctx.view;
  float* part = sum + v.hidden;
  std::fill_n(sum, v.hidden, 0.0f);
  const TokenRows rows = token_rows(ctx, v.rank, token);
  const auto next = [&](std::int32_t from) {
    return next_combine_group(rows.ids, v.topk, v.group_experts, from);
  };
  for (ExpertRange group = next(0); !group.is_empty(); group = next(group.end)) {
    if (v.choice.sums_cross && !is_here(v, group)) {
      add_sum_from_afar(ctx, token * v.topk + first_slot(rows.ids, group), sum);
      continue;
    }
    add_rows(ctx, rows, group, part);
    if (v.combine_partials == CombinePartials::kBf16) {
      std::vector<bf16>& rounded = scratch.gathered[0];
      rounded.resize(static_cast<std::size_t>(v.hidden));
      ctx.kernels.round_row(v.hidden, part, rounded.data());
      ctx.kernels.add_row(v.hidden, sum, rounded.data());
    } else {
      ctx.kernels.add_f32_row(v.hidden, sum, part);
    }
  }
}

void copy_dprobs(const PassContext& ctx, std::int64_t token) {
  const PassView& v = ctx.view;
  const float* pushed = ctx.peer(v.rank).get<Tensor::kDprobSlots>();
  for (std::int64_t slot = token * v.topk; slot < (token + 1) * v.topk; ++slot) {
    ctx.get<Tensor::kDprobs>()[slot] = v.topk_ids[slot] < 0 ? 0.0f : pushed[slot];
  }
}

}  // namespace

// out[t] or dx[t]: the token's rows summed over k ascending, each times its probability in the
// forward pass where that enters behind fc2; with combine groups by group, then over groups.
// dprobs copied.
void reduce(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const std::int64_t first = task.m * v.schedule.token_block;
  const std::int64_t end = min_of<std::int64_t>(first + v.schedule.token_block, v.tokens);
  const bool forward = v.pass == Pass::kForward;
  bf16* out = forward ? ctx.get<Tensor::kOut>() : ctx.get<Tensor::kDx>();
  float* sum = scratch.accumulators.reserve(static_cast<std::size_t>(2 * v.hidden));
  for (std::int64_t t = first; t < end; ++t) {
    if (v.group_experts > 0) {
      add_groups(ctx, t, scratch, sum);
    } else {
      add_rows(ctx, token_rows(ctx, v.rank, t), kAllExperts, sum);
    }
    if (!forward) copy_dprobs(ctx, t);
    ctx.kernels.round_row(v.hidden, sum, out + t * v.hidden);
  }
}

}  // namespace uniep::cpu
