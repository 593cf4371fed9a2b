#pragma once

#include <cstdint>

#include "cuda/device/fault_injection.cuh"
#include "cuda/device/queue_window.cuh"
#include "cuda/device/sm90/tile_shape.h"
#include "cuda/ptx/mbarrier.cuh"
#include "schedule/row_ring.h"
#include "uniep/stage.h"

namespace uniep::cuda {

// Roles of a CTA's warps: the first warpgroup has the loader, the scheduler and a sender for each
// consumer; the other warpgroups are the consumers.
inline constexpr int kLoaderWarp = 0;
inline constexpr int kSchedulerWarp = 1;
inline constexpr int kFirstSenderWarp = 2;
inline constexpr int kConsumerWarps = 4 * kConsumers;
inline constexpr int kThreads = 128 * (1 + kConsumers);
inline constexpr int kFirstConsumerThread = 128;
inline constexpr int kConsumerThreads = 128 * kConsumers;

/// Registers per thread after the roles have parted. A warpgroup can take what others have given of
/// those that the kernel begins with: 168 a thread, the most for 384 threads of 65536 registers.
inline constexpr int kProducerRegisters = 104;
inline constexpr int kConsumerRegisters = 200;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters == (1 + kConsumers) * 168);

inline constexpr int kBoxBytes = 64 * kBoxCols * kOperandBytes;  // operand or output, 64 x 64
/// Rows to push are bytes of 128 columns, one after another, 16 bytes apart so that the 8 rows of a
/// matrix lie in different banks.
inline constexpr int kPushCols = 128;
inline constexpr int kPushRowBytes = kPushCols * kOperandBytes + 16;

/// A task as the scheduler hands it to the other roles.
struct TileWork {
  Stage stage;
  int expert;
  int first_row;  // of a tile of rows: where tensors of the call have its first; reduce: token
  int saved_row;  // of a tile of rows: where tensors that are saved have its first
  int plan_row;   // of a tile of rows: the first as the plan numbers it; wgrad: of the expert
  int rows;       // real rows in it; reduce: tokens
  int m;          // wgrad: first row of the output tile
  int n;          // first column of the output tile
  int height;     // rows and columns of the output that the tile holds
  int width;
  int k_blocks;  // pipeline slots to consume, at least 1: steps of 64 along the reduction; reduce:
                 // pieces
  int tile;      // task.m: the tile of rows
  int index;     // Task::tile

  __device__ __forceinline__ TaskName name() const { return {stage, index}; }
};
/// What stands in place of a stage when there are no more tasks.
inline constexpr Stage kNoStage = static_cast<Stage>(-1);

/// Tasks that the scheduler has handed over and some role is not done with.
inline constexpr int kWorkSlots = 4;
/// The loader asks for the next task when it has still to load so many slots of the one at hand.
/// Early enough to hide the draw and the look at counters, some 3 us. Not earlier: a task drawn
/// long before it begins no longer runs beside its neighbours in the queue, and operands that they
/// share are in L2 only for as long as they are read at about the same time.
inline constexpr int kDrawAhead = 8;
/// More than the tiles by which one role can be ahead of another: the work ring holds them to
/// kWorkSlots.
inline constexpr int kTilesUnderWay = 2 * kWorkSlots;

/// Everything that depends on the number of columns of a tile; and whether tensors of the call may
/// be a ring of rows (schedule/row_ring.h), which takes registers that other kernels need.
template <int kTileN, bool kRing = false>
struct TileShape {
  static constexpr bool kMayHaveRing = kRing;
  static constexpr int kN = kTileN;
  static constexpr int kAccumulators = kTileN / 2;  // per thread: 64 x kTileN over 128 threads
  static constexpr int kSlotBytes = (kTileM + kTileN) * kTileK * kOperandBytes;
  static constexpr int kSlots = kTileN == 256 ? 4 : 6;
  /// Output buffers of a consumer: boxes of its own, then its share of a borrowed pipeline slot.
  static constexpr int kOwnBoxes = 2;
  static constexpr int kBoxes = kOwnBoxes + kSlotBytes / kConsumers / kBoxBytes;
};

/// One step of 64 along the reduction: both operands.
template <class Shape>
struct OperandSlot {
  alignas(1024) std::uint8_t a[kTileM * kTileK * kOperandBytes];
  alignas(1024) std::uint8_t b[Shape::kN * kTileK * kOperandBytes];
};

template <class Shape>
struct PassShared {
  OperandSlot<Shape> slots[Shape::kSlots];
  alignas(1024) std::uint8_t outputs[kConsumers][64 * kPushRowBytes];
  std::uint64_t full[Shape::kSlots];
  std::uint64_t empty[Shape::kSlots];
  std::uint64_t work_full[kWorkSlots];
  std::uint64_t work_empty[kWorkSlots];
  std::uint64_t wanted;                              // a task after the first, by the loader
  std::uint64_t written[kConsumers][Shape::kBoxes];  // an output buffer, by its consumer
  std::uint64_t sent[kConsumers][Shape::kBoxes];     // and read again, by its sender
  TileWork work[kWorkSlots];
  DrawAtHand draw;
  int halves_sent[kTilesUnderWay];  // senders that are done with a tile, by its number
  int first_record;                 // of this launch in the CTA's row of the trace
};
inline constexpr int kMaxSharedBytes = 232448;  // that a CTA can have on sm_90
static_assert(sizeof(PassShared<TileShape<256>>) <= kMaxSharedBytes);
static_assert(sizeof(PassShared<TileShape<128>>) <= kMaxSharedBytes);

/// The row of the call's tensors that is row number `row` of the plan.
template <class Shape>
__device__ __forceinline__ int call_row(const PassView& v, std::int64_t row) {
  return static_cast<int>(Shape::kMayHaveRing ? ring_row(v, row) : row);
}

template <class Shape>
using SlotRing = ptx::RingPosition<Shape::kSlots>;

}  // namespace uniep::cuda
