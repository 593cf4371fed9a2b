#pragma once

#include "cuda/device/context.cuh"
#include "cuda/device/sm90/fragments.cuh"
#include "cuda/device/sm90/output_ring.cuh"
#include "cuda/device/sm90/tiles.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/stage_maps.h"

// What the two roles that a tile leaves the SM by know: output_ring.cuh says how.

namespace uniep::cuda {

/// What a thread of a consumer warpgroup knows.
template <class Shape>
struct Consumer {
  const DeviceContext& ctx;
  PassShared<Shape>& shared;
  const int index;  // of the warpgroup
  SlotRing<Shape> ring{};
  BufferParities used{};

  __device__ __forceinline__ Consumer(const DeviceContext& context, PassShared<Shape>& memory)
      : ctx(context), shared(memory), index(static_cast<int>(threadIdx.x) / 128 - 1) {}

  __device__ __forceinline__ int lane() const { return ptx::lane_id(); }
  /// The number within its warpgroup: the warp has rows [16 warp, 16 warp + 16) of its 64.
  __device__ __forceinline__ int warp() const { return ptx::thread_id() / 32 % 4; }

  /// First row of this warp within the tile.
  __device__ __forceinline__ int first_row() const { return kConsumerRows * index + 16 * warp(); }

  /// The next pipeline slot, when it is full.
  __device__ __forceinline__ OperandSlot<Shape>& wait_slot() {
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    return shared.slots[ring.slot];
  }
  __device__ __forceinline__ void release_slot(int slot) {
    ptx::mbarrier_arrive(&shared.empty[slot]);
  }

  /// Waits until an output buffer may be written again; a tile's first one in the borrowed slot
  /// also waits for the slot.
  __device__ __forceinline__ void acquire(int buffer) {
    if (buffer == OutputRing<Shape>::kFirstInSlot) wait_slot();
    ptx::mbarrier_wait(&shared.sent[index][buffer], used.of(buffer) ^ 1);
  }
  /// Hands it to the sender.
  __device__ __forceinline__ void commit(int buffer) {
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive(&shared.written[index][buffer]);
    used.flip(buffer);
  }

  /// Writes this warp's 16 rows by 64 columns of an output box, and hands it over.
  __device__ __forceinline__ void write_box(int box, const std::uint32_t (&pairs)[kPairs]) {
    acquire(box);
    store_box(OutputRing<Shape>::box(shared, index, ring.slot, box) + warp() * (kBoxBytes / 4),
              pairs);
    commit(box);
  }
  /// Writes them to an output box that has a row for each column, and hands it over.
  __device__ __forceinline__ void write_transposed(int box, const std::uint32_t (&pairs)[kPairs]) {
    acquire(box);
    store_box_transposed(OutputRing<Shape>::box(shared, index, ring.slot, box), warp(), pairs);
    commit(box);
  }
};

/// Where the rows of a sender's lane go, l and l + 32 of its consumer's 64; source -1: nowhere.
struct PushRows {
  static constexpr int kPerLane = kConsumerRows / 32;
  RowOrigin origin[kPerLane];

  __device__ __forceinline__ bool goes(int i) const { return origin[i].source >= 0; }
  __device__ __forceinline__ std::int64_t slot(int i, int slots) const {
    return std::int64_t{origin[i].token} * slots + origin[i].slot;
  }
};

/// What a thread of a sender warp knows.
template <class Shape>
struct Sender {
  const DeviceContext& ctx;
  PassShared<Shape>& shared;
  const int index;  // of its consumer
  const int lane;
  SlotRing<Shape> ring{};
  BufferParities used{};
  int tile_number = 0;

  __device__ __forceinline__ Sender(const DeviceContext& context, PassShared<Shape>& memory)
      : ctx(context),
        shared(memory),
        index(static_cast<int>(threadIdx.x) / 32 - kFirstSenderWarp),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void wait_written(int buffer) {
    ptx::mbarrier_wait(&shared.written[index][buffer], used.of(buffer));
    used.flip(buffer);
  }
  /// The buffer has been read, by this lane or by the copy engine.
  __device__ __forceinline__ void give_back(int buffer) {
    ptx::mbarrier_arrive(&shared.sent[index][buffer]);
  }
  /// This sender's half of the current pipeline slot, of which it has seen a buffer written, has
  /// been read.
  __device__ __forceinline__ void give_back_slot() {
    ptx::mbarrier_arrive(&shared.empty[ring.slot], kConsumerWarps / kConsumers);
    ring.advance();
  }

  /// Sends a tile's `count` boxes, the i-th by store(i, its address) in one lane.
  template <class Store>
  __device__ __forceinline__ void send_boxes(int count, Store&& store) {
    for (int i = 0; i < count; ++i) {
      const int box = OutputRing<Shape>::box_of(i, count);
      wait_written(box);
      if (lane == 0) {
        store(i, OutputRing<Shape>::box(shared, index, ring.slot, box));
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
      __syncwarp();
      give_back(box);
      if (i + 1 == OutputRing<Shape>::boxes_in_slot(count)) give_back_slot();
    }
  }

  /// True in the last of the senders to be done with a tile.
  __device__ __forceinline__ bool is_last() {
    int& halves = shared.halves_sent[tile_number % kTilesUnderWay];
    if (atomicAdd(&halves, 1) + 1 != kConsumers) return false;
    halves = 0;
    return true;
  }

  /// To be called by lane 0, which issued the stores of this sender's half: waits until they have
  /// landed; the last half of a tile then signals the stage's counters.
  template <Stage stage>
  __device__ __forceinline__ void signal_tile(const TileWork& work) {
    ptx::bulk_wait<0>();
    ptx::fence_proxy_async();
    __threadfence();
    if (!is_last() || !may_signal(ctx.fault_injection, work.name())) return;
    __threadfence();
    for_each_counter<kSignalsOf<stage>>([&](CounterKind kind) {
      const Signal s = tile_signal(ctx.view, kind, work.tile, work.expert);
      ptx::add_release_gpu(ctx.counter(s), s.amount);
    });
  }

  /// Says that the tile's rows, which in a ring are then others', have been read. By all lanes,
  /// once both halves of a tile are written: whoever computed them has read the rows of its expert.
  __device__ __forceinline__ void release_rows(const TileWork& work) {
    constexpr CounterKind kKind = CounterKind::kReleased;
    if ((ctx.view.stage(work.stage).signals & bit_of(kKind)) == 0) return;
    __syncwarp();
    if (lane != 0) return;
    __threadfence();
    if (!is_last() || !may_signal(ctx.fault_injection, work.name())) return;
    __threadfence();
    const Signal s = use_signal(ctx.view, kKind, work.expert);
    ptx::add_release_gpu(ctx.counter(s), s.amount);
  }
};

}  // namespace uniep::cuda
