#pragma once

#include "cuda/device/gemm.cuh"
#include "cuda/device/warp.cuh"

namespace uniep::cuda {

/// sum[i] += v[i] for 8 elements.
__device__ __forceinline__ void add_vector(float (&sum)[kVectorElements], const Vector& v) {
  const std::uint32_t pairs[] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = sum[2 * i] + low_of(pairs[i]);
    sum[2 * i + 1] = sum[2 * i + 1] + high_of(pairs[i]);
  }
}

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

/// out[t] or dx[t]: the sum over k ascending, from +0, of the token's rows that were pushed;
/// dropped slots are left out. The rows come through the pipeline, a piece of the columns of one
/// token's K rows at a time. In backward, dprobs too: copied, 0 at dropped slots.
template <class Shape>
struct Reduce {
  /// Columns [col, col + width) of the K rows of each of some tokens.
  struct Piece {
    int token, tokens, col, width;
  };

  /// Calls f(piece) for the pieces of a task, in order.
  template <class F>
  static __device__ __forceinline__ void for_each_piece(const PassView& v, const TileWork& work,
                                                        F&& f) {
    const auto hidden = static_cast<int>(v.hidden);
    const int columns = reduce_columns<Shape>(v);
    const int tokens = reduce_tokens<Shape>(v);
    const int end = work.first_row + work.rows;
    for (int token = work.first_row; token < end; token += tokens) {
      for (int col = 0; col < hidden; col += columns) {
        f(Piece{token, min_of(tokens, end - token), col, min_of(columns, hidden - col)});
      }
    }
  }

  static __device__ __forceinline__ void load(const DeviceContext& ctx, OperandSlot<Shape>& slot,
                                              std::uint64_t* full, const Piece& piece) {
    const PassView& v = ctx.view;
    const bf16* from = ctx.at<bf16>(v.rank, ctx.symmetric.combine) +
                       std::int64_t{piece.token} * v.topk * v.hidden + piece.col;
    const int bytes = piece.width * 2;
    const int rows = piece.tokens * v.topk;
    ptx::mbarrier_arrive_expect(full, rows * bytes);
    if (piece.width == v.hidden) return ptx::bulk_load(slot.a, from, rows * bytes, full);
    for (int k = 0; k < rows; ++k) {
      ptx::bulk_load(slot.a + k * bytes, from + k * v.hidden, bytes, full);
    }
  }

  static __device__ __forceinline__ void run(Consumer<Shape>& consumer, const TileWork& work) {
    const DeviceContext& ctx = consumer.ctx;
    if (ctx.view.pass == Pass::kBackward) copy_dprobs(ctx, work);
    KeptSlots kept(ctx.view, work.first_row + work.rows);
    for_each_piece(ctx.view, work, [&](const Piece& piece) {
      sum(consumer, piece, kept.of(piece.token, piece.tokens));
    });
  }

 private:
  /// The kept `slots` of one piece; the threads of all consumers share its vectors.
  static __device__ __forceinline__ void sum(Consumer<Shape>& consumer, const Piece& piece,
                                             unsigned slots) {
    constexpr int kAhead = 4;  // loads under way
    const DeviceContext& ctx = consumer.ctx;
    const int topk = ctx.view.topk;
    const int vectors = piece.width / kVectorElements;
    const auto* rows = reinterpret_cast<const Vector*>(consumer.wait_slot().a);
    for (int i = static_cast<int>(threadIdx.x) - 128; i < piece.tokens * vectors;
         i += 128 * kConsumers) {
      const int token = i / vectors;
      const int at = i % vectors;
      const Vector* row = rows + token * topk * vectors + at;
      const unsigned kept = slots >> (token * topk);
      float total[kVectorElements] = {};
      for (int first = 0; first < topk; first += kAhead) {
        Vector ahead[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (first + k < topk) ahead[k] = row[(first + k) * vectors];
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (first + k < topk && (kept >> (first + k) & 1) != 0) add_vector(total, ahead[k]);
        }
      }
      bf16* out = ctx.token_out + (std::int64_t{piece.token} + token) * ctx.view.hidden + piece.col;
      __stcs(reinterpret_cast<Vector*>(out) + at,
             Vector{pack_pair(total[0], total[1]), pack_pair(total[2], total[3]),
                    pack_pair(total[4], total[5]), pack_pair(total[6], total[7])});
    }
    consumer.release_slot(consumer.ring.slot);
    consumer.ring.advance();
  }

  static __device__ __forceinline__ void copy_dprobs(const DeviceContext& ctx,
                                                     const TileWork& work) {
    const int topk = ctx.view.topk;
    const std::int64_t first = std::int64_t{work.first_row} * topk;
    const float* pushed = ctx.at<float>(ctx.view.rank, ctx.symmetric.dprobs);
    for (int i = static_cast<int>(threadIdx.x) - 128; i < work.rows * topk; i += 128 * kConsumers) {
      const bool dropped = ctx.view.topk_ids[first + i] < 0;
      ctx.dprobs_out[first + i] = dropped ? 0.0f : __ldcg(pushed + first + i);
    }
  }
};

}  // namespace uniep::cuda
