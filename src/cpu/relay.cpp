#include "cpu/block_segments.h"
#include "cpu/stages.h"
#include "cpu/token_rows.h"
#include "schedule/dependencies.h"

namespace uniep::cpu {
namespace {

using Returned = std::span<const ReturnedRow>;

/// Where a row lies in tensors of [T, slots, ...] of its rank.
std::int64_t place_of(const PassView& v, const ReturnedRow& row) {
  return std::int64_t{row.token} * v.slots + row.slot;
}

void add_all_rows(const PassContext& ctx, int source, Returned rows, RailBlock& block) {
  const PassView& v = ctx.view;
  for (const ReturnedRow& row : rows) {
    add_segment<Tensor::kCombine>(ctx, block, source, place_of(v, row) * v.hidden, v.hidden);
  }
}

/// The experts of the combine group that a sum is of.
ExpertRange group_of(const PassView& v, int source, const ReturnedRow& sum) {
  const std::int32_t expert = v.ids_of(source, sum.token)[sum.slot];
  const std::int32_t begin = expert / v.group_experts * v.group_experts;
  return {begin, begin + v.group_experts};
}

/// Each in the place of its first row.
void add_sums(const PassContext& ctx, int source, Returned sums, Scratch& scratch) {
  const PassView& v = ctx.view;
  const auto width = static_cast<std::size_t>(v.hidden);
  float* sum = scratch.accumulators.reserve(sums.size() * width);
  std::vector<bf16>& rounded = scratch.gathered[0];
  if (!v.choice.fp32_sums) rounded.resize(sums.size() * width);
  bf16* to = rounded.data();
  for (const ReturnedRow& of : sums) {
    add_rows(ctx, token_rows(ctx, source, of.token), group_of(v, source, of), sum);
    if (v.choice.fp32_sums) {
      const std::int64_t place = std::int64_t{of.token} * v.topk + of.slot;
      add_segment<Tensor::kSums>(ctx, scratch.block, source, place * v.hidden, {sum, width});
    } else {
      ctx.kernels.round_row(v.hidden, sum, to);
      add_segment<Tensor::kCombine>(ctx, scratch.block, source, place_of(v, of) * v.hidden,
                                    {to, width});
      to += width;
    }
    sum += width;
  }
}

/// dprobs of a row, or of all rows of a sum.
void add_dprobs(const PassContext& ctx, int source, const ReturnedRow& row, RailBlock& block) {
  const PassView& v = ctx.view;
  const std::int64_t first = std::int64_t{row.token} * v.slots;
  const auto add = [&](int k) {
    add_segment<Tensor::kDprobSlots>(ctx, block, source, first + k, 1);
  };
  if (!v.choice.sums_cross) return add(row.slot);
  const ExpertRange group = group_of(v, source, row);
  const std::int32_t* ids = v.ids_of(source, row.token);
  for (int k = 0; k < v.topk; ++k) {
    if (group.has(ids[k])) add(k);
  }
}

}  // namespace

// Rows that this host has made of another host's tokens, or sums of them, to their rank.
void relay(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const int source = relayed_source(v, task);
  const auto [begin, end] = host_items(v, task);
  const Returned rows(v.across->returned + begin, v.across->returned + end);
  scratch.block.clear();
  if (v.choice.sums_cross) {
    add_sums(ctx, source, rows, scratch);
  } else {
    add_all_rows(ctx, source, rows, scratch.block);
  }
  if (v.pass == Pass::kForward) return;
  for (const ReturnedRow& row : rows) add_dprobs(ctx, source, row, scratch.block);
}

}  // namespace uniep::cpu
