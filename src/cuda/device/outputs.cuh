#pragma once

#include "cuda/device/context.cuh"
#include "cuda/device/fragments.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/stage_maps.h"

// How a tile leaves the SM. A consumer warpgroup writes its half of the tile into output buffers,
// and goes on to the next tile; its sender warp stores boxes by the copy engine or pushes rows by
// ordinary stores, waits until the bytes have landed and signals. So no consumer waits for a store,
// let alone to a peer's memory.
//
// Buffer b of a consumer is guarded by two barriers, `written[b]` and `sent[b]`; both sides go
// through buffers in the same order, which follows from the stage. Every lane arrives for itself,
// at these as at all barriers of a CTA: it costs no more than one that arrives for its warp, and
// racecheck cannot see what the others' accesses are ordered by then. The first Shape::kOwnBoxes
// boxes belong to the consumer; the others lie in its half of a pipeline slot that the loader hands
// over (kEpilogueSlots) and the senders give back (of dfc2, which has several such slots, behind h
// in one each: Dfc2::da_box). A tile's outputs go through the slot first, so
// that the next tile's loads have it back early.

namespace uniep::cuda {

/// Address of an output box of a consumer; `slot` is the borrowed one.
template <class Shape>
__device__ __forceinline__ std::uint8_t* output_box(PassShared<Shape>& shared, int consumer,
                                                    int slot, int box) {
  if (box < Shape::kOwnBoxes) return shared.outputs[consumer] + box * kBoxBytes;
  return shared.slots[slot].a + consumer * (Shape::kSlotBytes / kConsumers) +
         (box - Shape::kOwnBoxes) * kBoxBytes;
}

/// How many of a tile's `count` boxes go through the borrowed slot ...
template <class Shape>
__device__ constexpr int boxes_in_slot(int count) {
  return count <= Shape::kOwnBoxes ? 0 : min_of(count, Shape::kBoxes) - Shape::kOwnBoxes;
}
/// ... and the box of number i.
template <class Shape>
__device__ constexpr int box_of(int i, int count) {
  const int in_slot = boxes_in_slot<Shape>(count);
  return i < in_slot ? Shape::kOwnBoxes + i : (i - in_slot) % Shape::kOwnBoxes;
}

/// A bit per buffer: how often it was used, modulo 2.
class BufferParities {
 public:
  __device__ __forceinline__ int of(int buffer) const { return bits_ >> buffer & 1; }
  __device__ __forceinline__ void flip(int buffer) { bits_ ^= 1u << buffer; }

 private:
  unsigned bits_ = 0;
};

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
  /// Of the warpgroup: rows [16 warp, 16 warp + 16) of its 64.
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
    if (buffer == Shape::kOwnBoxes) wait_slot();
    ptx::mbarrier_wait(&shared.sent[index][buffer], used.of(buffer) ^ 1);
  }
  /// Hands it to the sender.
  __device__ __forceinline__ void commit(int buffer) {
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive(&shared.written[index][buffer]);
    used.flip(buffer);
  }

  /// Leaves the borrowed slot unused. It must be waited for all the same: whoever skipped a phase
  /// of a barrier could take the one before the next for the next.
  __device__ __forceinline__ void pass_on_slot() {
    acquire(Shape::kOwnBoxes);
    commit(Shape::kOwnBoxes);
    ring.advance();
  }

  /// Writes this warp's 16 rows by 64 columns of an output box, and hands it over.
  __device__ __forceinline__ void write_box(int box, const std::uint32_t (&pairs)[kPairs]) {
    acquire(box);
    store_box(output_box(shared, index, ring.slot, box) + warp() * (kBoxBytes / 4), pairs);
    commit(box);
  }
};

/// Where the rows of a sender's lane go, l and l + 32 of its consumer's 64; source -1: nowhere.
struct PushRows {
  static constexpr int kPerLane = kConsumerRows / 32;
  RowOrigin origin[kPerLane];

  __device__ __forceinline__ bool goes(int i) const { return origin[i].source >= 0; }
  __device__ __forceinline__ std::int64_t slot(int i, int topk) const {
    return std::int64_t{origin[i].token} * topk + origin[i].slot;
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
  /// Likewise for this sender's half of the current pipeline slot, of which it has seen a buffer
  /// written.
  __device__ __forceinline__ void give_back_slot() {
    ptx::mbarrier_arrive(&shared.empty[ring.slot], kConsumerWarps / kConsumers);
    ring.advance();
  }

  /// The consumer has passed the borrowed slot on.
  __device__ __forceinline__ void return_unused_slot() {
    wait_written(Shape::kOwnBoxes);
    give_back(Shape::kOwnBoxes);
    give_back_slot();
  }

  /// Sends a tile's `count` boxes, the i-th by store(i, its address) in one lane.
  template <class Store>
  __device__ __forceinline__ void send_boxes(int count, Store&& store) {
    for (int i = 0; i < count; ++i) {
      const int box = box_of<Shape>(i, count);
      wait_written(box);
      if (lane == 0) {
        store(i, output_box(shared, index, ring.slot, box));
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
      __syncwarp();
      give_back(box);
      if (i + 1 == boxes_in_slot<Shape>(count)) give_back_slot();
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
  /// landed; the last half of a tile then adds 1 to the counters.
  __device__ __forceinline__ void signal_tile(const TileWork& work, std::uint32_t* counter0,
                                              std::uint32_t* counter1) {
    ptx::bulk_wait<0>();
    ptx::fence_proxy_async();
    __threadfence();
    if (!is_last() || !may_signal(ctx.faults, work.name())) return;
    __threadfence();
    ptx::add_release_gpu(counter0, 1);
    if (counter1 != nullptr) ptx::add_release_gpu(counter1, 1);
  }
};

}  // namespace uniep::cuda
