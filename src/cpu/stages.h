#pragma once

#include "base/row_factors.h"
#include "cpu/pass_context.h"
#include "schedule/block_tasks.h"

namespace uniep::cpu {

// One tile routine per stage. Each does its task's arithmetic and copies, and nothing else:
// waiting, signalling and order are the engine's. Each is in the file of its stage's name,
// what is done again in the file of what is.

void dispatch(const PassContext& ctx, const Task& task);
void redispatch(const PassContext& ctx, const Task& task);
void expand(const PassContext& ctx, const Task& task);
void fc1(const PassContext& ctx, const Task& task, Scratch& scratch);
void refc1(const PassContext& ctx, const Task& task, Scratch& scratch);
void fc2(const PassContext& ctx, const Task& task, Scratch& scratch);
void dfc2(const PassContext& ctx, const Task& task, Scratch& scratch);
void dfc1(const PassContext& ctx, const Task& task, Scratch& scratch);
void wgrad2(const PassContext& ctx, const Task& task, Scratch& scratch);
void wgrad1(const PassContext& ctx, const Task& task, Scratch& scratch);
void reduce(const PassContext& ctx, const Task& task, Scratch& scratch);

/// These collect in `scratch.block` what goes to another host.
void send(const PassContext& ctx, const Task& task, Scratch& scratch);
void relay(const PassContext& ctx, const Task& task, Scratch& scratch);

/// Combine, the epilogue of fc2 and dfc1: rounds the tile's fp32 rows [tile.rows, cols] to bf16 and
/// writes each to its token's slot on the rank that it came from.
void push_rows(const PassContext& ctx, const Tile& tile, std::int64_t first_col, std::int64_t cols,
               const float* rows);

/// Combine of dprobs: adds up the column groups of each row and writes the sum to its slot.
void push_dprobs(const PassContext& ctx, const Tile& tile);

/// The probability of a row, wherever it is kept.
inline float prob_of_row(const PassContext& ctx, std::int64_t row) {
  return ctx.get<Tensor::kRowProbs>()[ctx.row<Tensor::kRowProbs>(row)];
}
inline float* groups_of_row(const PassContext& ctx, std::int64_t row) {
  return ctx.get<Tensor::kDprobGroups>() +
         ctx.row<Tensor::kDprobGroups>(row) * dprob_sums(ctx.view);
}

/// The stage's routine for `task`.
void run_stage(const PassContext& ctx, const Task& task, Scratch& scratch);

}  // namespace uniep::cpu
