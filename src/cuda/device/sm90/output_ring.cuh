#pragma once

#include "cuda/device/sm90/tile_shape.h"
#include "cuda/device/sm90/tiles.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
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
// in one each: Dfc2::da_box; of a weight gradient that is added to, in place of what was there). A
// tile's outputs go through the slot first, so that the next tile's loads have it back early.

namespace uniep::cuda {

/// The output buffers of a consumer: where they lie, and which of them a tile's outputs go through.
template <class Shape>
struct OutputRing {
  /// The first buffer in the borrowed slot, whose barriers also stand for the slot.
  static constexpr int kFirstInSlot = Shape::kOwnBoxes;

  /// Address of a box; `slot` is the borrowed one.
  static __device__ __forceinline__ std::uint8_t* box(PassShared<Shape>& shared, int consumer,
                                                      int slot, int box) {
    if (box < kFirstInSlot) return shared.outputs[consumer] + box * kBoxBytes;
    return shared.slots[slot].a + consumer * (Shape::kSlotBytes / kConsumers) +
           (box - kFirstInSlot) * kBoxBytes;
  }

  // A tile that leaves by boxes of 64 columns, `count` of them.

  /// How many go through the borrowed slot ...
  static __device__ constexpr int boxes_in_slot(int count) {
    return count <= kFirstInSlot ? 0 : min_of(count, Shape::kBoxes) - kFirstInSlot;
  }
  /// ... and the box of number i.
  static __device__ constexpr int box_of(int i, int count) {
    const int in_slot = boxes_in_slot(count);
    return i < in_slot ? kFirstInSlot + i : (i - in_slot) % kFirstInSlot;
  }
  static constexpr bool borrows(int count) { return count > kFirstInSlot; }

  // A tile that leaves by rows of kPushCols columns, a part each: where there are two, the first
  // through the borrowed slot, the last through the consumer's own boxes.

  static constexpr int kParts = Shape::kN / kPushCols;
  static __device__ constexpr bool part_in_slot(int part) { return part + 1 < kParts; }

  /// The beginning of the part's 64 rows.
  static __device__ __forceinline__ std::uint8_t* rows(PassShared<Shape>& shared, int consumer,
                                                       int slot, int part) {
    return box(shared, consumer, slot, part_in_slot(part) ? kFirstInSlot : 0);
  }
  /// f(buffer) for those that stand for a part: all of the consumer's own, or the first of the
  /// slot's.
  template <class F>
  static __device__ __forceinline__ void for_each_buffer(int part, F&& f) {
    if (part_in_slot(part)) return f(kFirstInSlot);
#pragma unroll
    for (int buffer = 0; buffer < kFirstInSlot; ++buffer) f(buffer);
  }
};

/// A bit per buffer: how often it was used, modulo 2.
class BufferParities {
 public:
  __device__ __forceinline__ int of(int buffer) const { return bits_ >> buffer & 1; }
  __device__ __forceinline__ void flip(int buffer) { bits_ ^= 1u << buffer; }

 private:
  unsigned bits_ = 0;
};

/// The slots of stages that borrow one for output buffers, or need none: nothing is loaded.
template <class Shape, bool kBorrow>
struct EmptyEpilogueSlots {
  static constexpr int kEpilogueSlots = kBorrow ? 1 : 0;
  static __device__ __forceinline__ void load_epilogue(const DeviceContext&, const StageMaps&,
                                                       OperandSlot<Shape>&, std::uint64_t* full,
                                                       const TileWork&, int) {
    ptx::mbarrier_arrive(full);
  }
};

}  // namespace uniep::cuda
