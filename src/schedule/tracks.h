#pragma once

#ifndef __CUDA_ARCH__
#include "base/check.h"
#endif
#include "base/math.h"
#include "uniep/stage.h"

namespace uniep {

/// How many blocks of a track are emitted in how many steps. Most tracks emit one a step, and are
/// answered without a division: divisions once took most of the time in which a GPU makes a table.
struct Pace {
  int blocks = 1;
  int steps = 1;

  /// Whole steps that go by before block `i`.
  UNIEP_HD int steps_before(int i) const {
    if (blocks == steps) return i;
    return static_cast<int>(mul_div(static_cast<std::uint32_t>(i),
                                    static_cast<std::uint32_t>(steps),
                                    static_cast<std::uint32_t>(blocks)));
  }
  /// Blocks that are emitted in the first `passed` steps.
  UNIEP_HD int blocks_within(int passed) const {
    if (blocks == steps) return passed;
    const auto of_steps = static_cast<std::uint32_t>(steps);
    return static_cast<int>(mul_div(static_cast<std::uint32_t>(passed),
                                    static_cast<std::uint32_t>(blocks), of_steps, of_steps - 1));
  }
};

/// A run of blocks of one stage within a queue: blocks `first` and following, from step `delay` on
/// one a step, or at another pace. Blocks of reduce: one, holding all token blocks, or where tokens
/// come in waves one for each. Blocks of wgrad: one per expert, in
/// their order.
struct Track {
  Stage stage = Stage::kDispatch;
  int first = 0;
  int count = 0;
  int delay = 0;
  bool mixed = false;  // with the other such track, which needs none of this one's blocks of a step
  Pace pace{};
  int left_out = 0;  // blocks that the pace has, from `delay` on, ahead of this track's first

  /// When block `first + i` is emitted.
  UNIEP_HD int step_of(int i) const { return delay + pace.steps_before(left_out + i); }
  /// How many of its blocks are emitted before a step.
  UNIEP_HD int blocks_before(int step) const {
    return clamp_to(pace.blocks_within(max_of(step - delay, 0)) - left_out, 0, count);
  }
  UNIEP_HD int blocks_in(int step) const { return blocks_before(step + 1) - blocks_before(step); }
};

/// Tracks of one queue; at equal steps the earlier track goes first, but the tasks of two `mixed`
/// ones, which are neighbours, are dealt out evenly among one another (mixed_blocks.h). Every
/// task's inputs come from tasks that stand earlier in the same queue, from the communication queue
/// of the same launch, from an earlier launch, or (reduce, which is last) from other ranks, so with
/// all workers resident and queues taken in order no schedule can deadlock.
struct TrackList {
  static constexpr int kMax = 12;
  Track tracks[kMax];
  int count = 0;

  UNIEP_HD void add(const Track& track) {
    check_room();
    tracks[count++] = track;
  }
  /// The first step after everything so far.
  UNIEP_HD int end() const {
    int end = 0;
    for (int i = 0; i < count; ++i) {
      if (tracks[i].count > 0) end = max_of(end, tracks[i].step_of(tracks[i].count - 1) + 1);
    }
    return end;
  }

 private:
  /// A graph may have more stages than fit.
  UNIEP_HD void check_room() const {
#ifdef __CUDA_ARCH__
    if (count == kMax) __trap();
#else
    ensure(count < kMax, "a queue of more than ", kMax, " tracks");
#endif
  }
};

/// One launch: workers in a communication role take `comm` first; all others, and they afterwards
/// where the schedule lets them join, take `main`.
struct Launch {
  TrackList comm;
  TrackList main;
};

}  // namespace uniep
