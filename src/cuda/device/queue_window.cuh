#pragma once

#include "cuda/device/warp.cuh"
#include "schedule/queue.h"

namespace uniep::cuda {

/// The part of a queue's table at which the scheduler stands, a block and its grid a lane: finding
/// tasks one after another takes no reads of memory until the part has been walked through.
class QueueWindow {
 public:
  __device__ __forceinline__ QueueWindow(const PassView& view, const QueueView& queue)
      : view_(view), queue_(queue), lane_(static_cast<int>(threadIdx.x) % 32) {
    read(0);
  }

  /// What `queue_task` returns. By all lanes, of the same index, which is never less than the last.
  __device__ __forceinline__ Task task(std::uint32_t index) {
    int entry = lane_of(index);
    // Those that it is mixed with stand on either side, and the end of the last counts too.
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
    const BlockGrid grid{of_lane(grid_.expert, found), of_lane(grid_.rows, found),
                         of_lane(grid_.cols, found), of_lane(grid_.first, found)};
    return block_task(view_, static_cast<Stage>(of_lane(static_cast<int>(block_.stage), found)),
                      grid, at - of_lane(begin_, found));
  }

 private:
  /// The block that holds task `index` if none are mixed.
  __device__ __forceinline__ int lane_of(std::uint32_t index) const {
    return __popc(__ballot_sync(kWholeWarp, begin_ <= index)) - 1;
  }

  template <class T>
  static __device__ __forceinline__ T of_lane(T value, int lane) {
    return __shfl_sync(kWholeWarp, value, lane);
  }

  __device__ __forceinline__ void read(int first) {
    first_ = first;
    const int i = first + lane_;
    begin_ = i <= queue_.count ? static_cast<std::uint32_t>(queue_.begin[i]) : UINT32_MAX;
    if (i >= queue_.count) return;
    block_ = queue_.blocks[i];
    grid_ = block_grid(view_, block_);
  }

  const PassView& view_;
  const QueueView& queue_;
  const int lane_;
  int first_ = 0;            // block of lane 0
  std::uint32_t begin_ = 0;  // of this lane's block; a ticket has no more bits either
  QueueBlock block_{};
  BlockGrid grid_{};
};

}  // namespace uniep::cuda
