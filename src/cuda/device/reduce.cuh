#pragma once

#include "cuda/device/context.cuh"
#include "cuda/device/vectors.cuh"
#include "cuda/device/warp.cuh"

// Reduce: out[t] or dx[t], the sum over k ascending, from +0, of the token's rows that were pushed,
// each times its probability in a forward pass where that enters behind fc2; dropped slots are left
// out. What shared experts give is added to that. In backward dprobs too: copied, 0 at dropped
// slots. What a CTA sums
// at a time, a piece, is some columns of the rows of a token, or all columns of a few tokens.

namespace uniep::cuda {

/// Columns [col, col + width) of the rows of each of some tokens.
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
  /// As many as let a token's rows of them fit a slot, or as are summed in a step where that leaves
  /// fewer threads without a vector.
  static __device__ __forceinline__ int columns_of(const PassView& v, int slot_bytes, int step) {
    const auto hidden = static_cast<int>(v.hidden);
    const int most = slot_bytes / (kBf16Bytes * v.slots) / kVectorElements * kVectorElements;
    const int pieces = ceil_div(hidden, most);
    const int columns = round_up(ceil_div(hidden, pieces), kVectorElements);
    const bool by_steps = pieces * ceil_div(columns, step) > ceil_div(hidden, step);
    return by_steps ? min_of(columns, step) : columns;
  }
  /// More than one where a slot holds the rows of more, up to a lane for each row.
  static __device__ __forceinline__ int tokens_of(const PassView& v, int slot_bytes) {
    const int row_bytes = kBf16Bytes * static_cast<int>(v.hidden);
    return max_of(1, min_of(slot_bytes / (v.slots * row_bytes), 32 / v.slots));
  }

  int hidden_, columns_, tokens_;
};

/// sum[i] += factor v[i] for 8 elements.
__device__ __forceinline__ void add_vector(float (&sum)[kVectorElements], const Vector& v,
                                           float factor = 1.0f) {
  const std::uint32_t pairs[] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = sum[2 * i] + factor * low_of(pairs[i]);
    sum[2 * i + 1] = sum[2 * i + 1] + factor * high_of(pairs[i]);
  }
}

/// Which slots of a task's tokens are not dropped; those of shared experts never are. A lane reads
/// those of one token, so that 32 tokens wait once for the way to memory; read piece by piece, each
/// waited as long as its sums take.
template <bool kGeneral>
class KeptSlots {
 public:
  __device__ __forceinline__ KeptSlots(const PassView& v, int end_token)
      : ids_(v.topk_ids),
        topk_(v.topk),
        shared_(kGeneral ? ((1u << v.slots) - 1) & ~((1u << v.topk) - 1) : 0),
        end_(end_token),
        token_(ptx::lane_id() / v.slots),
        slot_(ptx::lane_id() % v.slots) {}

  /// Bit t n + k: slot k, of n, of token `token` + t, of `count` tokens and at most 32 slots. By
  /// all lanes, of ascending tokens.
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
    mask_ = shared_;
    const std::int32_t* ids = ids_ + std::int64_t{mine} * topk_;
#pragma unroll 8
    for (int k = 0; k < topk_; ++k) mask_ |= (ids[k] >= 0 ? 1u : 0u) << k;
  }

  const std::int32_t* ids_;
  int topk_;
  unsigned shared_;    // the bits of shared experts' slots
  int end_;            // of the task's tokens
  int token_, slot_;   // which bit of a piece's this lane finds
  int first_ = -32;    // the token of lane 0
  unsigned mask_ = 0;  // of this lane's token, a bit a slot
};

/// The sum of slots [first, end) of a token, as far as bit k of `kept` says so, each times factor k
/// if there are any. `rows`: a vector of slot 0, those of other slots `step` further on each.
__device__ __forceinline__ void sum_slots(float (&total)[kVectorElements], const Vector* rows,
                                          int step, int first, int end, unsigned kept,
                                          const float* factors) {
  constexpr int kAhead = 4;  // loads under way
  for (; first < end; first += kAhead) {
    Vector ahead[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (first + k < end) ahead[k] = rows[(first + k) * step];
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (first + k >= end || (kept >> (first + k) & 1) == 0) continue;
      add_vector(total, ahead[k], factors ? __ldg(factors + first + k) : 1.0f);
    }
  }
}

__device__ __forceinline__ Vector rounded(const float (&v)[kVectorElements]) {
  return {pack_pair(v[0], v[1]), pack_pair(v[2], v[3]), pack_pair(v[4], v[5]),
          pack_pair(v[6], v[7])};
}

/// Where the factors of a token's rows are, or null: `probs` of the token, [T, `width`], behind
/// `before` slots that have others.
__device__ __forceinline__ const float* factors_of(const PassView& v, const float* probs,
                                                   std::int64_t token, int width, int before) {
  const bool weighted = v.pass == Pass::kForward && v.probs == Probs::kAfter;
  return weighted && probs != nullptr ? probs + token * width - before : nullptr;
}

/// What a token's shared experts give is rounded as its other rows' sum is, and added to that.
__device__ __forceinline__ void add_shared(const DeviceContext& ctx, std::int64_t token,
                                           const Vector* rows, int step,
                                           float (&total)[kVectorElements]) {
  const PassView& v = ctx.view;
  const Vector routed = rounded(total);
  float shared[kVectorElements] = {};
  const float* factors =
      factors_of(v, ctx.get<Tensor::kSharedProbs>(), token, v.shared_experts, v.topk);
  sum_slots(shared, rows, step, v.topk, v.slots, ~0u, factors);
  const Vector of_shared = rounded(shared);
#pragma unroll
  for (float& sum : total) sum = -0.0f;  // which changes nothing that is added to it
  add_vector(total, routed);
  add_vector(total, of_shared);
}

/// One piece, of whose rows `rows` is the first in shared memory, by `threads` threads of which
/// this one is number `thread`. Bit t n + k of `slots`: slot k, of n, of the piece's token t is
/// kept. `kGeneral`: rows may count times their probabilities, and experts be shared.
template <bool kGeneral>
__device__ __forceinline__ void sum_piece(const DeviceContext& ctx, const ReducePiece& piece,
                                          const Vector* rows, unsigned slots, int thread,
                                          int threads) {
  const PassView& v = ctx.view;
  const int vectors = piece.width / kVectorElements;
  for (int i = thread; i < piece.tokens * vectors; i += threads) {
    const int token = i / vectors;
    const int at = i % vectors;
    const Vector* row = rows + token * v.slots * vectors + at;
    const std::int64_t of_rank = std::int64_t{piece.token} + token;
    const float* factors = nullptr;
    if (kGeneral) factors = factors_of(v, ctx.get<Tensor::kTopkProbs>(), of_rank, v.topk, 0);
    float total[kVectorElements] = {};
    sum_slots(total, row, vectors, 0, v.topk, slots >> (token * v.slots), factors);
    if (kGeneral && v.shared_experts > 0) add_shared(ctx, of_rank, row, vectors, total);
    bf16* out = ctx.get_of_pass<Tensor::kOut, Tensor::kDx>() + of_rank * v.hidden + piece.col;
    __stcs(reinterpret_cast<Vector*>(out) + at, rounded(total));
  }
}

/// dprobs of `tokens` tokens from `first_token` on, by as many threads. `kGeneral`: those of shared
/// experts too, if they are wanted.
template <bool kGeneral>
__device__ __forceinline__ void copy_dprobs(const DeviceContext& ctx, int first_token, int tokens,
                                            int thread, int threads) {
  const PassView& v = ctx.view;
  const float* pushed =
      ctx.peer(v.rank).get<Tensor::kDprobSlots>() + std::int64_t{first_token} * v.slots;
  const std::int64_t first = std::int64_t{first_token} * v.topk;
  for (int i = thread; i < tokens * v.topk; i += threads) {
    const int slot = kGeneral ? i / v.topk * v.slots + i % v.topk : i;
    const bool dropped = v.topk_ids[first + i] < 0;
    ctx.get<Tensor::kDprobs>()[first + i] = dropped ? 0.0f : __ldcg(pushed + slot);
  }
  if (!kGeneral || ctx.get<Tensor::kDsharedProbs>() == nullptr) return;
  float* shared = ctx.get<Tensor::kDsharedProbs>() + std::int64_t{first_token} * v.shared_experts;
  for (int i = thread; i < tokens * v.shared_experts; i += threads) {
    const int slot = i / v.shared_experts * v.slots + v.topk + i % v.shared_experts;
    shared[i] = __ldcg(pushed + slot);
  }
}

}  // namespace uniep::cuda
