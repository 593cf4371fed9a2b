#pragma once

#include "cuda/device/gemm.cuh"

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

/// out[t] or dx[t]: the sum over k ascending, from +0, of the token's rows that were pushed;
/// dropped slots are left out. The rows come through the pipeline, a piece of the columns of one
/// token's K rows at a time. In backward, dprobs too: copied, 0 at dropped slots.
template <class Shape>
struct Reduce {
  /// Piece number `index` of a task.
  struct Piece {
    std::int64_t token;
    int col, cols;
    __device__ __forceinline__ Piece(const PassView& v, const TileWork& work, int index) {
      const int most = reduce_columns<Shape>(v);
      const int pieces = work.k_blocks / work.rows;
      token = work.first_row + index / pieces;
      col = index % pieces * most;
      cols = min_of(most, static_cast<int>(v.hidden) - col);
    }
  };

  static __device__ __forceinline__ void load(const DeviceContext& ctx, OperandSlot<Shape>& slot,
                                              std::uint64_t* full, const TileWork& work,
                                              int index) {
    const PassView& v = ctx.view;
    const Piece piece(v, work, index);
    const bf16* rows =
        ctx.at<bf16>(v.rank, ctx.symmetric.combine) + piece.token * v.topk * v.hidden + piece.col;
    const int bytes = piece.cols * 2;
    ptx::mbarrier_arrive_expect(full, v.topk * bytes);
    if (piece.cols == v.hidden) return ptx::bulk_load(slot.a, rows, v.topk * bytes, full);
    for (int k = 0; k < v.topk; ++k) {
      ptx::bulk_load(slot.a + k * bytes, rows + k * v.hidden, bytes, full);
    }
  }

  /// Sums one piece; the threads of all consumers share its vectors.
  static __device__ __forceinline__ void sum(Consumer<Shape>& consumer, const TileWork& work,
                                             int index) {
    const DeviceContext& ctx = consumer.ctx;
    const PassView& v = ctx.view;
    const Piece piece(v, work, index);
    const std::int32_t* ids = v.topk_ids + piece.token * v.topk;
    unsigned kept = 0;
    for (int k = 0; k < v.topk; ++k) kept |= (ids[k] >= 0 ? 1u : 0u) << k;
    const int vectors = piece.cols / kVectorElements;
    const auto* rows = reinterpret_cast<const Vector*>(consumer.wait_slot().a);
    auto* out = reinterpret_cast<Vector*>(ctx.token_out + piece.token * v.hidden + piece.col);
    for (int i = 128 * consumer.index + static_cast<int>(threadIdx.x) % 128; i < vectors;
         i += 128 * kConsumers) {
      float total[kVectorElements] = {};
      for (int k = 0; k < v.topk; ++k) {
        if ((kept >> k & 1) != 0) add_vector(total, rows[k * vectors + i]);
      }
      __stcs(out + i, Vector{pack_pair(total[0], total[1]), pack_pair(total[2], total[3]),
                             pack_pair(total[4], total[5]), pack_pair(total[6], total[7])});
    }
    consumer.release_slot(consumer.ring.slot);
    consumer.ring.advance();
  }

  static __device__ __forceinline__ void run(Consumer<Shape>& consumer, const TileWork& work) {
    const DeviceContext& ctx = consumer.ctx;
    if (ctx.view.pass == Pass::kBackward) copy_dprobs(ctx, work);
    for (int i = 0; i < work.k_blocks; ++i) sum(consumer, work, i);
  }

 private:
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
