#pragma once

#include "cuda/device/warp.cuh"
#include "schedule/queue.h"

namespace uniep::cuda {

/// What is left of a draw of several tasks: in shared memory, since some kernels have no registers
/// for it.
struct DrawAtHand {
  int lane;            // of the window, which has the draw's block
  std::uint32_t next;  // task of the block
  std::uint32_t left;  // tasks
};

/// The part of a queue's table at which the scheduler stands, a block and its grid a lane: finding
/// draws one after another takes no reads of memory until the part has been walked through.
class QueueWindow {
 public:
  __device__ __forceinline__ QueueWindow(const PassView& view, const QueueView& queue,
                                         DrawAtHand& at_hand)
      : view_(view), queue_(queue), at_hand_(at_hand), lane_(static_cast<int>(threadIdx.x) % 32) {
    read(0);
    keep({});
  }

  /// The first task of what `queue_draw` returns. By all lanes, of the same index, which is never
  /// less than the last, when nothing is left.
  __device__ __forceinline__ Task draw(std::uint32_t index) {
    int entry = lane_of(index);
    // The blocks that it is mixed with stand on either side, and the end of the last counts too.
    static_assert(2 * kMostMixedBlocks <= 32, "no place in the window would do");
    while (entry >= 32 - kMostMixedBlocks) {
      read(first_ + entry - (kMostMixedBlocks - 1));
      entry = lane_of(index);
    }
    const auto mix = __builtin_bit_cast(
        MixedBlocks, of_lane(__builtin_bit_cast(std::uint32_t, block_.mix), entry));
    const auto begin = [&](int lane) { return std::int64_t{of_lane(begin_, lane)}; };
    const auto at =
        static_cast<std::uint32_t>(mix.listed_index(begin, entry, index, view_.schedule.mix_run));
    const int found = lane_of(at);
    const std::uint32_t run = of_lane(run_, found);
    const std::uint32_t first = (at - of_lane(begin_, found)) * run;
    if (run > 1) {
      keep({found, first + 1, min_of(run, of_lane(rows_ * cols_, found) - first) - 1});
    }
    return task_of(found, first);
  }

  /// Tasks of the draw that have not been taken.
  __device__ __forceinline__ std::uint32_t left() const { return at_hand_.left; }

  /// The next of these. By all lanes.
  __device__ __forceinline__ Task next() {
    const DrawAtHand at = at_hand_;
    keep({at.lane, at.next + 1, at.left - 1});
    return task_of(at.lane, at.next);
  }

 private:
  /// The block that holds draw `index` if none are mixed.
  __device__ __forceinline__ int lane_of(std::uint32_t index) const {
    return __popc(__ballot_sync(kWholeWarp, begin_ <= index)) - 1;
  }

  /// Number `index` of a lane's block.
  __device__ __forceinline__ Task task_of(int lane, std::uint32_t index) const {
    const BlockGrid grid{of_lane(expert_, lane), of_lane(rows_, lane), of_lane(cols_, lane),
                         of_lane(first_task_, lane)};
    return block_task(view_, static_cast<Stage>(of_lane(static_cast<int>(block_.stage), lane)),
                      grid, index);
  }

  template <class T>
  static __device__ __forceinline__ T of_lane(T value, int lane) {
    return __shfl_sync(kWholeWarp, value, lane);
  }

  __device__ __forceinline__ void keep(const DrawAtHand& at) const {
    __syncwarp();  // all lanes have read what was there
    if (lane_ == 0) at_hand_ = at;
    __syncwarp();
  }

  __device__ __forceinline__ void read(int first) {
    first_ = first;
    const int i = first + lane_;
    begin_ = i <= queue_.count ? static_cast<std::uint32_t>(queue_.begin[i]) : UINT32_MAX;
    if (i >= queue_.count) return;
    block_ = queue_.blocks[i];
    const BlockGrid grid = block_grid(view_, block_.stage, block_.block);
    expert_ = grid.expert;
    rows_ = grid.rows;
    cols_ = grid.cols;
    first_task_ = static_cast<std::uint32_t>(grid.first);
    run_ = tasks_of_draw(view_, block_.stage, grid.expert);
  }

  const PassView& view_;
  const QueueView& queue_;
  DrawAtHand& at_hand_;
  const int lane_;
  int first_ = 0;            // block of lane 0
  std::uint32_t begin_ = 0;  // of this lane's block; the count of draws has no more bits either
  QueueBlock block_{};
  // Its BlockGrid, in fewer registers: no rank has 2^32 tiles or pulls. And its tasks_of_draw.
  int expert_ = -1;
  std::uint32_t rows_ = 0, cols_ = 1, first_task_ = 0, run_ = 1;
};

}  // namespace uniep::cuda
