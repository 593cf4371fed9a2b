#pragma once

#include "cuda/device/reduce.cuh"
#include "cuda/device/sm90/gemm.cuh"

namespace uniep::cuda {

/// Reduce by the roles of a CTA: the loader brings the rows of a chunk through the pipeline, the
/// threads of all consumers share its vectors.
template <class Shape>
struct Reduce {
  static constexpr Stage kStage = Stage::kReduce;

  /// Calls f(chunk) for the chunks of a task, in order.
  template <class F>
  static __device__ __forceinline__ void for_each_chunk(const PassView& v, const TileWork& work,
                                                        F&& f) {
    ReduceChunks(v, Shape::kSlotBytes, kConsumerThreads)
        .for_each(work.first_row, work.first_row + work.rows, f);
  }

  static __device__ __forceinline__ void load(const DeviceContext& ctx, OperandSlot<Shape>& slot,
                                              std::uint64_t* full, const ReduceChunk& chunk) {
    const PassView& v = ctx.view;
    const bf16* from = ctx.peer(v.rank).template get<Tensor::kCombine>() +
                       std::int64_t{chunk.token} * v.slots * v.hidden + chunk.col;
    const int bytes = chunk.width * kBf16Bytes;
    const int rows = chunk.tokens * v.slots;
    ptx::mbarrier_arrive_expect(full, rows * bytes);
    if (chunk.width == v.hidden) return ptx::bulk_load(slot.a, from, rows * bytes, full);
    for (int k = 0; k < rows; ++k) {
      ptx::bulk_load(slot.a + k * bytes, from + k * v.hidden, bytes, full);
    }
  }

  template <bool kGeneral, Pass kPass>
  static __device__ __forceinline__ void run(Consumer<Shape>& consumer, const TileWork& work) {
    const DeviceContext& ctx = consumer.ctx;
    const int thread = known_here(static_cast<int>(threadIdx.x) - kFirstConsumerThread);
    if constexpr (kPass == Pass::kBackward) {
      copy_dprobs(ctx, work.first_row, work.rows, thread, kConsumerThreads);
    }
    KeptSlots kept(ctx.view, work.first_row + work.rows);
    for_each_chunk(ctx.view, work, [&](const ReduceChunk& chunk) {
      const unsigned slots = kept.of(chunk.token, chunk.tokens);
      const auto* rows = reinterpret_cast<const Vector*>(consumer.wait_slot().a);
      sum_chunk<kGeneral, kPass>(ctx, chunk, rows, slots, thread, kConsumerThreads);
      consumer.release_slot(consumer.ring.slot);
      consumer.ring.advance();
    });
  }
};

}  // namespace uniep::cuda
