#pragma once

#include "base/contract.h"
#include "cuda/device/context.cuh"
#include "cuda/device/vectors.cuh"
#include "cuda/device/warp.cuh"

// Reduce: out[t] or dx[t], the sum over k ascending, from +0, of the token's rows that were pushed,
// each times its probability in a forward pass where that enters behind fc2; dropped slots are left
// out. With combine groups, the sum over the token's groups ascending of such sums. In backward
// dprobs too: copied, 0 at dropped slots. What a CTA sums at a time, a piece, is some columns of
// the K rows of a token, or all columns of a few tokens.

namespace uniep::cuda {

/// Columns [col, col + width) of the K rows of each of some tokens.
struct ReducePiece {
  int token, tokens, col, width;
};

/// How a task is cut into pieces, each of which fits into `slot_bytes`.
class ReducePieces {
 public:
  /// `threads` sum a vector each at a time.
  __device__ __forceinline__ ReducePieces(const PassView& v, int slot_bytes, int threads)
      : hidden_(static_cast<int>(v.hidden)),
        columns_(columns_of(v, slot_bytes, threads * kVectorElements)),
        tokens_(columns_ < hidden_ ? 1 : tokens_of(v, slot_bytes)) {}

  __device__ __forceinline__ int count(int tokens) const {
    return ceil_div(tokens, tokens_) * ceil_div(hidden_, columns_);
  }

  /// Calls f(piece) for those of tokens [first, end), in order.
  template <class F>
  __device__ __forceinline__ void for_each(int first, int end, F&& f) const {
    for (int token = first; token < end; token += tokens_) {
      for (int col = 0; col < hidden_; col += columns_) {
        f(ReducePiece{token, min_of(tokens_, end - token), col, min_of(columns_, hidden_ - col)});
      }
    }
  }

 private:
  /// As many as let K rows of them fit a slot, or as are summed in a step where that leaves fewer
  /// threads without a vector.
  static __device__ __forceinline__ int columns_of(const PassView& v, int slot_bytes, int step) {
    const auto hidden = static_cast<int>(v.hidden);
    const int most = slot_bytes / (kBf16Bytes * v.topk) / kVectorElements * kVectorElements;
    const int pieces = ceil_div(hidden, most);
    const int columns = round_up(ceil_div(hidden, pieces), kVectorElements);
    const bool by_steps = pieces * ceil_div(columns, step) > ceil_div(hidden, step);
    return by_steps ? min_of(columns, step) : columns;
  }
  /// More than one where a slot holds the rows of more, up to a lane for each row.
  static __device__ __forceinline__ int tokens_of(const PassView& v, int slot_bytes) {
    const int row_bytes = kBf16Bytes * static_cast<int>(v.hidden);
    return max_of(1, min_of(slot_bytes / (v.topk * row_bytes), 32 / v.topk));
  }

  int hidden_, columns_, tokens_;
};

/// Which slots of a task's tokens are not dropped. A lane reads those of one token, so that 32
/// tokens wait once for the way to memory; read piece by piece, each waited as long as its sums
/// take.
class KeptSlots {
 public:
  __device__ __forceinline__ KeptSlots(const PassView& v, int end_token)
      : ids_(v.topk_ids),
        topk_(v.topk),
        end_(end_token),
        token_(ptx::lane_id() / v.topk),
        slot_(ptx::lane_id() % v.topk) {}

  /// Bit t K + k: slot k of token `token` + t, of `count` tokens and at most 32 slots. By all
  /// lanes, of ascending tokens.
  __device__ __forceinline__ unsigned of(int token, int count) {
    if (token + count > first_ + 32) read(token);
    const unsigned mask = __shfl_sync(kWholeWarp, mask_, token - first_ + token_);
    return __ballot_sync(kWholeWarp, token_ < count && (mask >> slot_ & 1) != 0);
  }

 private:
  __device__ __forceinline__ void read(int token) {
    first_ = token;
    mask_ = 0;
    const int mine = token + ptx::lane_id();
    if (mine >= end_) return;
    const std::int32_t* ids = ids_ + std::int64_t{mine} * topk_;
#pragma unroll 8
    for (int k = 0; k < topk_; ++k) mask_ |= (ids[k] >= 0 ? 1u : 0u) << k;
  }

  const std::int32_t* ids_;
  int topk_;
  int end_;            // of the task's tokens
  int token_, slot_;   // which bit of a piece's this lane finds
  int first_ = -32;    // the token of lane 0
  unsigned mask_ = 0;  // of this lane's token, a bit a slot
};

/// Adds slots of a token, k ascending, of whose vectors `row` is the first and the next lie `step`
/// further. Bit k of `slots`: slot k is added, times factors[k] where there are factors.
template <bool kGeneral>
__device__ __forceinline__ void add_slots(float (&total)[kVectorElements], const Vector* row,
                                          int step, int topk, unsigned slots,
                                          const float* factors) {
  constexpr int kAhead = 4;  // loads under way
  for (int first = 0; first < topk; first += kAhead) {
    Vector ahead[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (first + k < topk) ahead[k] = row[(first + k) * step];
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (first + k >= topk || (slots >> (first + k) & 1) == 0) continue;
      add_vector(total, ahead[k], kGeneral && factors ? __ldg(factors + first + k) : 1.0f);
    }
  }
}

/// A token's combine groups, ascending, as bits of its slots (contract.h). Without groups its kept
/// slots are one.
class GroupsOfToken {
 public:
  __device__ __forceinline__ GroupsOfToken(const PassView& v, std::int64_t token, unsigned kept)
      : ids_(v.topk_ids + token * v.topk),
        topk_(v.topk),
        group_experts_(v.group_experts),
        left_(kept) {}

  /// The next group's slots; 0: there are no more.
  __device__ __forceinline__ unsigned next() {
    unsigned slots = left_;
    if (group_experts_ > 0 && left_ != 0) {
      const ExpertRange group = next_combine_group(ids_, topk_, group_experts_, from_);
      slots = 0;
      for (int k = 0; k < topk_; ++k) slots |= (group.has(ids_[k]) ? 1u : 0u) << k;
      from_ = group.end;
    }
    left_ &= ~slots;
    return slots;
  }

 private:
  const std::int32_t* ids_;
  int topk_, group_experts_;
  std::int32_t from_ = 0;
  unsigned left_;  // of the token's kept slots
};

/// total += part, as partial sums are added up.
__device__ __forceinline__ void add_partial(float (&total)[kVectorElements],
                                            const float (&part)[kVectorElements], bool rounded) {
#pragma unroll
  for (int i = 0; i < kVectorElements; i += 2) {
    const std::uint32_t pair = pack_pair(part[i], part[i + 1]);
    total[i] = total[i] + (rounded ? low_of(pair) : part[i]);
    total[i + 1] = total[i + 1] + (rounded ? high_of(pair) : part[i + 1]);
  }
}

/// One piece, of whose rows `rows` is the first in shared memory, by `threads` threads of which
/// this one is number `thread`. Bit t K + k of `slots`: slot k of the piece's token t is kept.
/// `kGeneral`: rows may count times their probabilities, and be added up in groups.
template <bool kGeneral>
__device__ __forceinline__ void sum_piece(const DeviceContext& ctx, const ReducePiece& piece,
                                          const Vector* rows, unsigned slots, int thread,
                                          int threads) {
  const int topk = ctx.view.topk;
  const int vectors = piece.width / kVectorElements;
  for (int i = thread; i < piece.tokens * vectors; i += threads) {
    const int token = i / vectors;
    const int at = i % vectors;
    const Vector* row = rows + token * topk * vectors + at;
    const unsigned kept = slots >> (token * topk);
    const std::int64_t of_rank = std::int64_t{piece.token} + token;
    float total[kVectorElements] = {};
    if constexpr (kGeneral) {
      const PassView& v = ctx.view;
      const float* factors = nullptr;
      if (v.pass == Pass::kForward && v.probs == Probs::kAfter) {
        factors = ctx.get<Tensor::kTopkProbs>() + of_rank * topk;
      }
      const bool rounded = v.group_experts > 0 && v.combine_partials == CombinePartials::kBf16;
      // Slots of other tokens stand above.
      GroupsOfToken groups(v, of_rank, kept & ((1u << topk) - 1));
      for (unsigned group = groups.next(); group != 0; group = groups.next()) {
        float part[kVectorElements] = {};
        add_slots<true>(part, row, vectors, topk, group, factors);
        add_partial(total, part, rounded);
      }
    } else {
      add_slots<false>(total, row, vectors, topk, kept, nullptr);
    }
    bf16* out =
        ctx.get_of_pass<Tensor::kOut, Tensor::kDx>() + of_rank * ctx.view.hidden + piece.col;
    __stcs(reinterpret_cast<Vector*>(out) + at,
           Vector{pack_pair(total[0], total[1]), pack_pair(total[2], total[3]),
                  pack_pair(total[4], total[5]), pack_pair(total[6], total[7])});
  }
}

/// dprobs of `tokens` tokens from `first_token` on, by as many threads.
__device__ __forceinline__ void copy_dprobs(const DeviceContext& ctx, int first_token, int tokens,
                                            int thread, int threads) {
  const int topk = ctx.view.topk;
  const std::int64_t first = std::int64_t{first_token} * topk;
  const float* pushed = ctx.peer(ctx.view.rank).get<Tensor::kDprobSlots>();
  for (int i = thread; i < tokens * topk; i += threads) {
    const bool dropped = ctx.view.topk_ids[first + i] < 0;
    ctx.get<Tensor::kDprobs>()[first + i] = dropped ? 0.0f : __ldcg(pushed + first + i);
  }
}

}  // namespace uniep::cuda
