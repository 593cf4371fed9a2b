#include "cpu/block_segments.h"
#include "cpu/stages.h"
#include "cpu/token_rows.h"
#include "schedule/returns.h"

namespace uniep::cpu {
namespace {

/// Calls f(token, k) for the slots of a block of a rank's tokens whose experts are on this host.
template <class F>
void for_each_slot_here(const PassView& v, int source, const TokenRange& tokens, F&& f) {
  for (std::int64_t token = tokens.begin; token < tokens.end; ++token) {
    const std::int32_t* ids = v.ids_of(source, token);
    for (int k = 0; k < v.topk; ++k) {
      if (ids[k] >= 0 && v.is_here(v.rank_of_expert(ids[k]))) f(token, k);
    }
  }
}

void add_all_rows(const PassContext& ctx, int source, const TokenRange& tokens, RailBlock& block) {
  const PassView& v = ctx.view;
  for_each_slot_here(v, source, tokens, [&](std::int64_t token, int k) {
    add_segment<Tensor::kCombine>(ctx, block, source, (token * v.topk + k) * v.hidden, v.hidden);
  });
}

/// Calls f(token, group) for the groups on this host that a block of a rank's tokens has rows of.
template <class F>
void for_each_group_here(const PassView& v, int source, const TokenRange& tokens, F&& f) {
  for (std::int64_t token = tokens.begin; token < tokens.end; ++token) {
    const std::int32_t* ids = v.ids_of(source, token);
    const auto next = [&](std::int32_t from) {
      return next_combine_group(ids, v.topk, v.group_experts, from);
    };
    for (ExpertRange group = next(0); !group.is_empty(); group = next(group.end)) {
      if (is_here(v, group)) f(token, group);
    }
  }
}

/// A sum for each group, in the place of its first row.
void add_sums(const PassContext& ctx, int source, const TokenRange& tokens, Scratch& scratch) {
  const PassView& v = ctx.view;
  std::size_t count = 0;
  for_each_group_here(v, source, tokens, [&](std::int64_t, ExpertRange) { ++count; });
  const auto width = static_cast<std::size_t>(v.hidden);
  float* sum = scratch.accumulators.reserve(count * width);
  std::vector<bf16>& rounded = scratch.gathered[0];
  if (!v.choice.fp32_sums) rounded.resize(count * width);
  bf16* to = rounded.data();
  for_each_group_here(v, source, tokens, [&](std::int64_t token, ExpertRange group) {
    const TokenRows rows = token_rows(ctx, source, token);
    add_rows(ctx, rows, group, sum);
    const std::int64_t place = (token * v.topk + first_slot(rows.ids, group)) * v.hidden;
    if (v.choice.fp32_sums) {
      add_segment<Tensor::kSums>(ctx, scratch.block, source, place, {sum, width});
    } else {
      ctx.kernels.round_row(v.hidden, sum, to);
      add_segment<Tensor::kCombine>(ctx, scratch.block, source, place, {to, width});
      to += width;
    }
    sum += width;
  });
}

}  // namespace

// What this host has made of a block of another host's tokens, to their rank.
void relay(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const int source = relayed_source(v, task);
  const TokenRange tokens = tokens_of_block(v, source, task.m);
  scratch.block.clear();
  if (v.choice.sums_cross) {
    add_sums(ctx, source, tokens, scratch);
  } else {
    add_all_rows(ctx, source, tokens, scratch.block);
  }
  if (v.pass == Pass::kForward) return;
  for_each_slot_here(v, source, tokens, [&](std::int64_t token, int k) {
    add_segment<Tensor::kDprobSlots>(ctx, scratch.block, source, token * v.topk + k, 1);
  });
}

}  // namespace uniep::cpu
