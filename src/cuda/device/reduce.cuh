#pragma once

#include "cuda/device/context.cuh"
#include "cuda/device/token_sums.cuh"
#include "cuda/device/warp.cuh"

// Reduce: out[t] or dx[t], the sum over k ascending, from +0, of the token's rows that were pushed,
// each times its probability in a forward pass where that enters behind fc2; dropped slots are left
// out. With combine groups, the sum over the token's groups ascending of such sums. The rows of
// shared experts are a sum of their own, and both are rounded before they are added up. With
// slot_rows each slot has a sum of its own, of its row alone. In backward dprobs too: copied, 0 at
// dropped slots. What a CTA sums at a time, a chunk, is some columns of the rows of a token, one a
// slot, or all columns of a few tokens.

namespace uniep::cuda {

/// Columns [col, col + width) of the rows of each of some tokens.
struct ReduceChunk {
  int token, tokens, col, width;
};

/// How a task is cut into chunks, each of which fits into `slot_bytes`.
class ReduceChunks {
 public:
  /// `threads` sum a vector each at a time.
  __device__ __forceinline__ ReduceChunks(const PassView& v, int slot_bytes, int threads)
      : hidden_(known_here(static_cast<int>(v.hidden))),
        slots_(known_here(v.slots)),
        columns_(columns_of(slot_bytes, threads * kVectorElements)),
        tokens_(columns_ < hidden_ ? 1 : tokens_of(slot_bytes)) {}

  __device__ __forceinline__ int count(int tokens) const {
    return ceil_div(tokens, tokens_) * ceil_div(hidden_, columns_);
  }

  /// Calls f(chunk) for those of tokens [first, end), in order.
  template <class F>
  __device__ __forceinline__ void for_each(int first, int end, F&& f) const {
    for (int token = first; token < end; token += tokens_) {
      for (int col = 0; col < hidden_; col += columns_) {
        f(ReduceChunk{token, min_of(tokens_, end - token), col, min_of(columns_, hidden_ - col)});
      }
    }
  }

 private:
  /// The most columns of which a token's rows fit `slot_bytes`, or as many as are summed in a step
  /// if that leaves fewer threads without a vector.
  __device__ __forceinline__ int columns_of(int slot_bytes, int step) const {
    const int most = slot_bytes / (kBf16Bytes * slots_) / kVectorElements * kVectorElements;
    const int chunks = ceil_div(hidden_, most);
    const int columns = round_up(ceil_div(hidden_, chunks), kVectorElements);
    const bool by_steps = chunks * ceil_div(columns, step) > ceil_div(hidden_, step);
    return by_steps ? min_of(columns, step) : columns;
  }
  /// More than one where a slot holds the rows of more, up to a lane for each row.
  __device__ __forceinline__ int tokens_of(int slot_bytes) const {
    const int row_bytes = kBf16Bytes * hidden_;
    return max_of(1, min_of(slot_bytes / (slots_ * row_bytes), 32 / slots_));
  }

  int hidden_, slots_, columns_, tokens_;
};

/// Which slots of a task's tokens are not dropped. A lane reads those of one token, so that 32
/// tokens wait once for the way to memory; read chunk by chunk, each waited as long as its sums
/// take.
class KeptSlots {
 public:
  __device__ __forceinline__ KeptSlots(const PassView& v, int end_token)
      : ids_(v.topk_ids),
        topk_(known_here(v.topk)),
        slots_(known_here(v.slots)),
        shared_(((1u << slots_) - 1) - ((1u << topk_) - 1)),
        end_(end_token),
        token_(ptx::lane_id() / slots_),
        slot_(ptx::lane_id() % slots_) {}

  /// Bit t (K + S) + k: slot k of token `token` + t, of `count` tokens and at most 32 slots. By all
  /// lanes, of ascending tokens.
  __device__ __forceinline__ unsigned of(int token, int count) {
    if (token + count > first_ + 32) read(token);
    const unsigned mask = __shfl_sync(kWholeWarp, mask_, token - first_ + token_);
    return __ballot_sync(kWholeWarp, token_ < count && (mask >> slot_ & 1) != 0);
  }

 private:
  __device__ __forceinline__ void read(int token) {
    first_ = token;
    mask_ = shared_;
    const int mine = token + ptx::lane_id();
    if (mine >= end_) return;
    const std::int32_t* ids = ids_ + std::int64_t{mine} * topk_;
#pragma unroll 8
    for (int k = 0; k < topk_; ++k) mask_ |= (ids[k] >= 0 ? 1u : 0u) << k;
  }

  const std::int32_t* ids_;
  int topk_, slots_;
  unsigned shared_;    // slots that are never dropped
  int end_;            // of the task's tokens
  int token_, slot_;   // which bit of a chunk's this lane finds
  int first_ = -32;    // the token of lane 0
  unsigned mask_ = 0;  // of this lane's token, a bit a slot
};

/// What the slots of a token's rows are multiplied by, by number of the slot; null: by nothing.
template <Pass kPass>
__device__ __forceinline__ const float* factors_of_slots(const DeviceContext& ctx,
                                                         std::int64_t token, bool shared) {
  const PassView& v = ctx.view;
  if (kPass != Pass::kForward || v.probs != Probs::kAfter || v.slot_rows) return nullptr;
  if (!shared) return ctx.get<Tensor::kTopkProbs>() + token * v.topk;
  const float* probs = ctx.get<Tensor::kSharedProbs>();
  return probs == nullptr ? nullptr : probs + token * v.shared_experts - v.topk;
}

/// One chunk, of whose rows `rows` is the first in shared memory, by `threads` threads of which
/// this one is number `thread`. Bit t (K + S) + k of `slots`: slot k of the chunk's token t is
/// kept. `kGeneral`: rows may count times their probabilities, and be added up in groups, or not.
template <bool kGeneral, Pass kPass>
__device__ __forceinline__ void sum_chunk(const DeviceContext& ctx, const ReduceChunk& chunk,
                                          const Vector* rows, unsigned slots, int thread,
                                          int threads) {
  const int topk = known_here(ctx.view.topk);
  const int token_slots = known_here(ctx.view.slots);
  // With slot_rows each slot is a sum of its own.
  const int sum_slots = kGeneral && ctx.view.slot_rows ? 1 : token_slots;
  const int sums = token_slots / sum_slots;  // of a token
  const int vectors = chunk.width / kVectorElements;
  for (int i = thread; i < chunk.tokens * sums * vectors; i += threads) {
    const int number = i / vectors;
    const int at = i % vectors;
    const Vector* row = rows + number * sum_slots * vectors + at;
    const auto load = [&](int k) { return row[k * vectors]; };
    const unsigned kept = slots >> (number * sum_slots);
    const std::int64_t of_rank = std::int64_t{chunk.token} * sums + number;
    float total[kVectorElements] = {};
    if constexpr (kGeneral) {
      const PassView& v = ctx.view;
      const bool rounded = v.group_experts > 0 && v.combine_partials == CombinePartials::kBf16;
      // Slots of other sums stand above.
      GroupsOfToken groups(v.topk_ids + of_rank * v.topk, v.topk, v.group_experts,
                           kept & ((1u << sum_slots) - 1));
      for (unsigned group = groups.next(); group != 0; group = groups.next()) {
        const bool shared = group >> topk != 0;
        float part[kVectorElements] = {};
        add_slots<true>(part, load, shared ? topk : 0,
                        shared ? token_slots : min_of(topk, sum_slots), group,
                        factors_of_slots<kPass>(ctx, of_rank, shared));
        if (shared) round_sums(total);
        add_partial(total, part, rounded || shared);
      }
    } else {
      add_slots<false>(total, load, 0, topk, kept, nullptr);
      if (token_slots > topk) {
        float part[kVectorElements] = {};
        add_slots<false>(part, load, topk, token_slots, kept, nullptr);
        round_sums(total);
        add_partial(total, part, true);
      }
    }
    constexpr Tensor kSum = kPass == Pass::kForward ? Tensor::kOut : Tensor::kDx;
    bf16* out = ctx.get<kSum>() + of_rank * ctx.view.hidden + chunk.col;
    __stcs(reinterpret_cast<Vector*>(out) + at, rounded_vector(total));
  }
}

/// dprobs of `tokens` tokens from `first_token` on, by as many threads, those of shared experts
/// too.
__device__ __forceinline__ void copy_dprobs(const DeviceContext& ctx, int first_token, int tokens,
                                            int thread, int threads) {
  const PassView& v = ctx.view;
  const int slots = known_here(v.slots);
  const int shared = slots - v.topk;
  const std::int64_t first = std::int64_t{first_token} * slots;
  const float* pushed = ctx.peer(v.rank).get<Tensor::kDprobSlots>() + first;
#pragma unroll 1
  for (int i = thread; i < tokens * slots; i += threads) {
    std::int64_t at = first + i;
    if (shared > 0) {
      const std::int64_t token = first_token + i / slots;
      const int number = i % slots - v.topk;
      if (number >= 0) {
        float* to = ctx.get<Tensor::kDsharedProbs>();
        if (to != nullptr) to[token * shared + number] = __ldcg(pushed + i);
        continue;
      }
      at -= token * shared;
    }
    ctx.get<Tensor::kDprobs>()[at] = v.topk_ids[at] < 0 ? 0.0f : __ldcg(pushed + i);
  }
}

}  // namespace uniep::cuda
