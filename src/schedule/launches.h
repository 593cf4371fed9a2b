#pragma once

#include "schedule/pass_view.h"

namespace uniep {

/// Most that the axis `waves` can be, and launches that a pass can then have: a wave each, and two
/// more of the data path and two of wgrad.
inline constexpr int kMaxWaves = 16;
inline constexpr int kMaxLaunches = kMaxWaves + 2 + 2;

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
/// one a step, or at another pace. Blocks of reduce: one, holding all token blocks. Blocks of
/// wgrad: one per expert, by slot.
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
/// ones, which are neighbours, are dealt out evenly among one another (dealt_task). Every task's
/// inputs come from tasks that stand earlier in the same queue, from the communication queue of the
/// same launch, from an earlier launch, or (reduce, which is last) from other ranks, so with all
/// workers resident and queues taken in order no schedule can deadlock.
struct TrackList {
  static constexpr int kMax = 6;
  Track tracks[kMax];
  int count = 0;

  UNIEP_HD void add(const Track& track) { tracks[count++] = track; }
  UNIEP_HD void add(Stage stage, int first, int blocks, int delay) {
    add({.stage = stage, .first = first, .count = blocks, .delay = delay});
  }
  /// The first step after everything so far.
  UNIEP_HD int end() const {
    int end = 0;
    for (int i = 0; i < count; ++i) {
      if (tracks[i].count > 0) end = max_of(end, tracks[i].step_of(tracks[i].count - 1) + 1);
    }
    return end;
  }
};

/// One launch: workers in a communication role take `comm` first; all others, and they afterwards
/// where the schedule lets them join, take `main`.
struct Launch {
  TrackList comm;
  TrackList main;
};

namespace detail {

/// Which parts of the pass the launch holds.
struct LaunchParts {
  bool dispatch = false, first_gemm = false, second_gemm = false, reduce = false;
  int dispatch_begin = 0, dispatch_end = 0;  // blocks
  int gemm_begin = 0, gemm_end = 0;          // blocks
  bool last_gemm = false;                    // no later launch has second_gemm blocks
};

inline UNIEP_HD LaunchParts launch_parts(const PassView& v, int index) {
  const int blocks = v.num_blocks();
  const int waves = v.schedule.waves;
  const int experts = v.num_local_experts;
  LaunchParts p{.dispatch_end = blocks, .gemm_end = blocks, .last_gemm = true};
  switch (v.schedule.launch) {
    case LaunchGrouping::kSeparate:
      p.dispatch = index == 0;
      p.first_gemm = index == 1;
      p.second_gemm = index == 2;
      p.reduce = index == 3;
      break;
    case LaunchGrouping::kPipelined:
      p.dispatch = index < waves;
      p.dispatch_begin = index * experts;
      p.dispatch_end = (index + 1) * experts;
      p.first_gemm = p.second_gemm = index >= 1 && index <= waves;
      p.gemm_begin = (index - 1) * experts;
      p.gemm_end = index * experts;
      p.last_gemm = index == waves;
      p.reduce = index == waves + 1;
      break;
    case LaunchGrouping::kPaired:
      p.dispatch = p.first_gemm = index == 0;
      p.second_gemm = p.reduce = index == 1;
      break;
    case LaunchGrouping::kSingle:
      p.dispatch = p.first_gemm = p.second_gemm = p.reduce = index == 0;
      break;
  }
  return p;
}

/// Launches that begin with something else than weight gradients.
inline UNIEP_HD int data_launches(const PassView& v) {
  if (!v.moves_data()) return 0;
  switch (v.schedule.launch) {
    case LaunchGrouping::kSeparate:
      return 4;
    case LaunchGrouping::kPipelined:
      return v.schedule.waves + 2;
    case LaunchGrouping::kPaired:
      return 2;
    default:
      return 1;
  }
}

/// Launches of nothing but weight gradients, behind these: one of both where none other holds them.
inline UNIEP_HD int weight_launches(const PassView& v) {
  if (!v.has_weight_grads()) return 0;
  if (v.schedule.wgrad == WgradPlacement::kSeparate) return 2;
  return v.moves_data() ? 0 : 1;
}

}  // namespace detail

inline UNIEP_HD int num_launches(const PassView& v) {
  return detail::data_launches(v) + detail::weight_launches(v);
}

/// A launch as timelines number it: parts of one pass, under one schedule, are numbered through.
inline UNIEP_HD int launch_number(const PassView& v, int index) {
  PassView data_part = v;
  data_part.part = PassPart::kData;
  return index + (v.moves_data() ? 0 : detail::data_launches(data_part));
}

/// Blocks by which the second GEMM follows the first where they share a launch: `lag` experts, or
/// more where it takes more to hold `lag_tiles` tiles of the first, at the rank's average.
inline UNIEP_HD int lag_blocks(const PassView& v) {
  const std::int64_t blocks = v.num_blocks();
  const std::int64_t tiles = v.tile_begin[blocks] * column_tiles(v, v.first_gemm());
  if (tiles == 0) return v.schedule.lag;
  const std::int64_t wanted = ceil_div(v.schedule.lag_tiles * blocks, tiles);
  return max_of(v.schedule.lag, static_cast<int>(min_of(wanted, blocks)));
}

namespace detail {

/// The second GEMM's `blocks` in a launch that has as many of the first, from step `delay` on: it
/// begins `head_start` percent of them behind, or `lag` where that is more, and has come up to the
/// lag when it ends.
inline UNIEP_HD Track following_track(const PassView& v, int first, int blocks, int delay,
                                      int lag) {
  Track track{.stage = v.second_gemm(), .first = first, .count = blocks, .delay = delay};
  if (blocks == 0) return track;
  const int behind = max_of(lag, ceil_div(blocks * v.schedule.head_start, 100));
  const int begin = min_of(behind, blocks);
  const int end = clamp_to(lag, min_of(begin, 1), begin);
  track.delay += begin;
  track.pace = {.blocks = blocks, .steps = blocks - begin + end};
  // Without a lag, fc2 of an expert stands behind its own fc1.
  track.mixed = begin > 0 && v.schedule.mix_run > 0;
  return track;
}

}  // namespace detail

/// Launch number `index` of the pass, the second GEMM `lag` blocks behind the first. Which stages
/// and how many of their blocks it holds does not depend on the lag.
inline UNIEP_HD Launch launch_with_lag(const PassView& v, int index, int lag) {
  Launch launch;
  const int experts = v.num_local_experts;
  const int data = detail::data_launches(v);
  if (index >= data) {
    const bool both = detail::weight_launches(v) == 1;
    if (both || index == data) launch.main.add(Stage::kWgrad2, 0, experts, 0);
    if (both || index > data) launch.main.add(Stage::kWgrad1, 0, experts, 0);
    return launch;
  }
  const detail::LaunchParts p = detail::launch_parts(v, index);
  const bool computes = p.first_gemm || p.second_gemm;
  int delay = 0;
  if (p.dispatch) {
    // With no dispatch workers, dispatch runs one block ahead of the tiles in the same queue.
    const bool inline_dispatch = computes && v.schedule.dispatch_workers == 0;
    TrackList& queue = inline_dispatch ? launch.main : launch.comm;
    queue.add(Stage::kDispatch, p.dispatch_begin, p.dispatch_end - p.dispatch_begin, 0);
    delay = inline_dispatch ? 1 : 0;
  }
  const int gemm_blocks = p.gemm_end - p.gemm_begin;
  Track first{.stage = v.first_gemm(), .first = p.gemm_begin, .count = gemm_blocks, .delay = delay};
  Track second = first;
  second.stage = v.second_gemm();
  if (p.first_gemm && p.second_gemm) {
    second = detail::following_track(v, p.gemm_begin, gemm_blocks, delay, lag);
    first.mixed = second.mixed;
  }
  if (p.first_gemm) launch.main.add(first);
  if (p.second_gemm) launch.main.add(second);
  if (v.has_weight_grads()) {
    // An expert's weight gradients need its rows of every wave: they follow its last block.
    if (v.schedule.wgrad == WgradPlacement::kInterleaved && p.second_gemm && p.last_gemm) {
      for (const Stage stage : {Stage::kWgrad2, Stage::kWgrad1}) {
        launch.main.add({.stage = stage,
                         .count = experts,
                         .delay = second.delay,
                         .pace = second.pace,
                         .left_out = gemm_blocks - experts});
      }
    }
    if (v.schedule.wgrad == WgradPlacement::kAfter && p.reduce) {
      const int end = launch.main.end();
      launch.main.add(Stage::kWgrad2, 0, experts, end);
      launch.main.add(Stage::kWgrad1, 0, experts, end);
    }
  }
  if (p.reduce) launch.main.add(Stage::kReduce, 0, 1, launch.main.end());
  return launch;
}

/// Launch number `index` of the pass.
inline UNIEP_HD Launch launch_at(const PassView& v, int index) {
  return launch_with_lag(v, index, v.moves_data() ? lag_blocks(v) : 0);
}

/// What a launch holds, where the view's arrays are out of reach, as are a GPU's on the host.
inline UNIEP_HD Launch launch_contents(const PassView& v, int index) {
  return launch_with_lag(v, index, 0);
}

}  // namespace uniep
