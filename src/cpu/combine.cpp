#include "cpu/stages.h"

namespace uniep::cpu {

void push_rows(const PassContext& ctx, const Tile& tile, std::int64_t first_col, std::int64_t cols,
               const float* rows) {
  const PassView& v = ctx.view;
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const RowOrigin& origin = v.row_origin[tile.first_row + i];
    const std::int64_t slot = std::int64_t{origin.token} * v.slots + origin.slot;
    bf16* target = ctx.peer(origin.source).get<Tensor::kCombine>() + slot * v.hidden + first_col;
    ctx.kernels.round_row(cols, rows + i * cols, target);
  }
}

void push_dprobs(const PassContext& ctx, const Tile& tile) {
  const PassView& v = ctx.view;
  const std::int64_t groups = dprob_sums(v);
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const std::int64_t row = tile.first_row + i;
    const RowOrigin& origin = v.row_origin[row];
    float sum = 0;
    for (std::int64_t g = 0; g < groups; ++g) sum += groups_of_row(ctx, row)[g];
    if (v.probs == Probs::kAfter) sum /= factor_of_dy(prob_of_row(ctx, row));
    float* slots = ctx.peer(origin.source).get<Tensor::kDprobSlots>();
    slots[std::int64_t{origin.token} * v.slots + origin.slot] = sum;
  }
}

}  // namespace uniep::cpu
