#pragma once

#ifndef __CUDA_ARCH__
#include "base/check.h"
#endif
#include "base/outlined.h"
#include "graph/extents.h"
#include "schedule/row_ring.h"
#include "schedule/token_waves.h"

namespace uniep {

/// Launches that a pass can have: a wave each, and two more of the data path and two of wgrad.
inline constexpr int kMaxLaunches = static_cast<int>(kMostWaves) + 2 + 2;
static_assert(kMaxStages <= kMaxLaunches, "every stage can have a launch of its own");

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
/// come in waves one for each. Blocks of wgrad: one per expert, by slot.
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

namespace detail {

/// Which stages a launch holds, weight gradients aside, and how many of their blocks.
struct LaunchParts {
  // Places. Rows come back to other hosts where the second product is.
  bool fetch = false, again = false, first = false, second = false, back = false, last = false;
  Stage only{};                        // where every stage has a launch of its own
  bool has_only = false;               // that is so
  int fetch_begin = 0, fetch_end = 0;  // blocks
  int begin = 0, end = 0;              // blocks of kAgain, kFirst and kSecond
  bool last_wave = true;               // no later launch has blocks of kSecond

  UNIEP_HD bool holds(Stage stage, StagePlace place) const {
    if (has_only && stage != only) return false;
    switch (place) {
      case StagePlace::kCross:
      case StagePlace::kFetch:
      case StagePlace::kRefetch:
        return fetch;
      case StagePlace::kAgain:
        return again;
      case StagePlace::kFirst:
        return first;
      case StagePlace::kSecond:
        return second;
      case StagePlace::kReturn:
        return back;
      case StagePlace::kLast:
        return last;
      case StagePlace::kEnter:
      case StagePlace::kWeights:
        break;
    }
    return false;
  }
};

/// Number `index` of the stages that queues hold, weight gradients aside.
inline UNIEP_HD Stage data_stage(const PassView& v, int index) {
  for (int i = 0;; ++i) {
    const Stage stage = v.stage_at(i);
    if (v.stage(stage).place != StagePlace::kWeights && index-- == 0) return stage;
  }
}

inline UNIEP_HD LaunchParts launch_parts(const PassView& v, int index) {
  const int blocks = v.num_blocks();
  const int waves = v.schedule.waves;
  const int experts = v.num_local_experts;
  LaunchParts p{.fetch_end = blocks, .end = blocks};
  switch (v.schedule.launch) {
    case LaunchGrouping::kSeparate: {
      p.has_only = true;
      p.only = data_stage(v, index);
      const StagePlace place = v.stage(p.only).place;
      p.fetch = place == StagePlace::kFetch || place == StagePlace::kRefetch ||
                place == StagePlace::kCross;
      p.again = place == StagePlace::kAgain;
      p.first = place == StagePlace::kFirst;
      p.second = place == StagePlace::kSecond;
      p.back = place == StagePlace::kReturn;
      p.last = place == StagePlace::kLast;
      break;
    }
    case LaunchGrouping::kPipelined:
      p.fetch = index < waves;
      p.fetch_begin = index * experts;
      p.fetch_end = (index + 1) * experts;
      p.again = p.first = p.second = p.back = index >= 1 && index <= waves;
      p.begin = (index - 1) * experts;
      p.end = index * experts;
      p.last_wave = index == waves;
      p.last = index == waves + 1;
      break;
    case LaunchGrouping::kPaired:
      p.fetch = p.again = p.first = index == 0;
      p.second = p.back = p.last = index == 1;
      break;
    case LaunchGrouping::kSingle:
      p.fetch = p.again = p.first = p.second = p.back = p.last = index == 0;
      break;
    case LaunchGrouping::kWaves:
      p.fetch = p.again = p.first = p.second = p.back = true;
      p.begin = p.fetch_begin = index * experts;
      p.end = p.fetch_end = (index + 1) * experts;
      p.last_wave = p.last = index == waves - 1;
      p.last = p.last || waves_done_early(v, index).count > 0;
      break;
  }
  return p;
}

/// Launches of all parts of the pass that begin with something else than weight gradients.
inline UNIEP_HD int launches_of_data(const PassView& v) {
  switch (v.schedule.launch) {
    case LaunchGrouping::kSeparate:
      return v.num_data_stages;
    case LaunchGrouping::kPipelined:
      return v.schedule.waves + 2;
    case LaunchGrouping::kPaired:
      return 2;
    case LaunchGrouping::kWaves:
      return v.schedule.waves;
    case LaunchGrouping::kSingle:
      break;
  }
  return 1;
}

/// Those of this part.
inline UNIEP_HD int data_launches(const PassView& v) {
  return v.moves_data() ? launches_of_data(v) : 0;
}

/// Launches of nothing but weight gradients, behind these: one of all where none other holds them.
inline UNIEP_HD int weight_launches(const PassView& v) {
  if (!v.has_weight_grads()) return 0;
  if (v.schedule.wgrad == WgradPlacement::kSeparate) return v.num_weight_stages;
  return v.moves_data() ? 0 : 1;
}

}  // namespace detail

inline UNIEP_HD int num_launches(const PassView& v) {
  return detail::data_launches(v) + detail::weight_launches(v);
}

/// A launch as timelines number it: parts of one pass, under one schedule, are numbered through.
inline UNIEP_HD int launch_number(const PassView& v, int index) {
  return index + (v.moves_data() ? 0 : detail::launches_of_data(v));
}

/// Blocks by which the second GEMM follows the first where they share a launch, and the first what
/// it needs again of the forward pass: `lag` experts, or
/// more where it takes more to hold `lag_tiles` tiles of the first, at the rank's average.
inline UNIEP_HD int lag_blocks(const PassView& v) {
  const std::int64_t blocks = v.num_blocks();
  const std::int64_t tiles = v.tile_begin[blocks] * column_tiles(v, StagePlace::kFirst);
  if (tiles == 0) return v.schedule.lag;
  const std::int64_t wanted = ceil_div(v.schedule.lag_tiles * blocks, tiles);
  return max_of(v.schedule.lag, static_cast<int>(min_of(wanted, blocks)));
}

namespace detail {

inline UNIEP_HD int stages_at(const PassView& v, StagePlace place) {
  int count = 0;
  for (int i = 0; i < v.num_stages; ++i) {
    if (v.stage(v.stage_at(i)).place == place) ++count;
  }
  return count;
}

/// How blocks of kSecond follow those of kFirst in a launch that holds both, from step `delay` on:
/// they begin `head_start` percent of all behind, or `lag` where that is more, and have come up to
/// the lag when they end.
inline UNIEP_HD Track following_track(const PassView& v, const LaunchParts& p, int delay, int lag) {
  const int blocks = p.end - p.begin;
  Track track{.first = p.begin, .count = blocks, .delay = delay};
  if (!p.first || !p.second || p.has_only || blocks == 0) return track;
  const int behind = max_of(lag, ceil_div(blocks * v.schedule.head_start, 100));
  const int begin = min_of(behind, blocks);
  const int end = clamp_to(lag, min_of(begin, 1), begin);
  track.delay += begin;
  track.pace = {.blocks = blocks, .steps = blocks - begin + end};
  // Without a lag, fc2 of an expert stands behind its own fc1. Mixed are the tasks of two stages.
  const bool two = stages_at(v, StagePlace::kFirst) == 1 && stages_at(v, StagePlace::kSecond) == 1;
  track.mixed = begin > 0 && v.schedule.mix_run > 0 && two;
  return track;
}

/// Adds the track once for every stage of a place that the launch holds.
inline UNIEP_HD void add_tracks(const PassView& v, const LaunchParts& p, StagePlace place,
                                Track track, TrackList& queue) {
  for (int i = 0; i < v.num_stages; ++i) {
    track.stage = v.stage_at(i);
    if (v.stage(track.stage).place == place && p.holds(track.stage, place)) queue.add(track);
  }
}

/// Whether the launch holds the first of the place's stages.
inline UNIEP_HD bool begins(const PassView& v, const LaunchParts& p, StagePlace place) {
  for (int i = 0; i < v.num_stages; ++i) {
    const Stage stage = v.stage_at(i);
    if (v.stage(stage).place == place) return p.holds(stage, place);
  }
  return false;
}

/// Whether the launch makes something of forward again for the first product, `lag` ahead of it.
inline UNIEP_HD bool makes_again(const PassView& v, const LaunchParts& p) {
  return p.again && !p.has_only && stages_at(v, StagePlace::kAgain) > 0;
}

/// How x is fetched again, in a launch that fetches `fetch` and whose second product is `second`.
/// Where the first product does not need it, it is in the way of none: a block's stands where the
/// second product stands, if that waits until it was pulled, or else the block's weight gradients;
/// or behind all else.
inline UNIEP_HD Track refetch_track(const PassView& v, const LaunchParts& p, Track fetch,
                                    const Track& second) {
  if (!p.first || p.has_only || makes_again(v, p)) return fetch;
  const bool beside = (v.num_ranks > 1 && v.choice.drops_received) ||
                      v.schedule.wgrad == WgradPlacement::kInterleaved;
  if (p.second && beside && second.first == fetch.first && second.count == fetch.count) {
    fetch.delay = second.delay;
    fetch.pace = second.pace;
  } else {
    fetch.delay += fetch.count;
  }
  return fetch;
}

/// What is fetched: x again first where it is what the first product's own input is made of.
inline UNIEP_HD void add_fetch(const PassView& v, const LaunchParts& p, int lag,
                               const Track& second, TrackList& queue) {
  Track fetch{.first = p.fetch_begin, .count = p.fetch_end - p.fetch_begin};
  add_tracks(v, p, StagePlace::kRefetch, refetch_track(v, p, fetch, second), queue);
  if (p.fetch_begin == p.begin && makes_again(v, p)) fetch.delay = min_of(lag, fetch.count);
  add_tracks(v, p, StagePlace::kFetch, fetch, queue);
}

/// What other hosts need of this rank goes ahead of all that waits, of all waves: at once.
inline UNIEP_HD void add_crossings(const PassView& v, const LaunchParts& p, TrackList& queue) {
  if (!v.has_hosts() || p.fetch_begin > 0) return;
  const int count = v.num_blocks();
  add_tracks(v, p, StagePlace::kCross, {.count = count, .pace = {.blocks = max_of(count, 1)}},
             queue);
}

/// Adds the track for weight gradient `number`, or with kAll for each of them.
inline constexpr int kAll = -1;
inline UNIEP_HD void add_weights(const PassView& v, int number, Track track, TrackList& queue) {
  int next = 0;
  for (int i = 0; i < v.num_stages; ++i) {
    track.stage = v.stage_at(i);
    if (v.stage(track.stage).place != StagePlace::kWeights) continue;
    if (number == kAll || number == next) queue.add(track);
    ++next;
  }
}

/// By how much the first product stands behind `delay`.
inline UNIEP_HD int first_delay(const PassView& v, const LaunchParts& p, int delay, int lag) {
  return delay + (makes_again(v, p) ? min_of(lag, p.end - p.begin) : 0);
}

/// Both products, ahead of them what the first needs again of the forward pass, and the weight
/// gradients that are interleaved with them: an expert's need its rows of every wave, so they
/// follow its last block.
inline UNIEP_HD void add_products(const PassView& v, const LaunchParts& p, int delay, int lag,
                                  const Track& second, TrackList& queue) {
  const int blocks = p.end - p.begin;
  const Track first{.first = p.begin,
                    .count = blocks,
                    .delay = first_delay(v, p, delay, lag),
                    .mixed = second.mixed};
  add_tracks(v, p, StagePlace::kAgain, {.first = p.begin, .count = blocks, .delay = delay}, queue);
  add_tracks(v, p, StagePlace::kFirst, first, queue);
  add_tracks(v, p, StagePlace::kSecond, second, queue);
  if (v.schedule.wgrad != WgradPlacement::kInterleaved || !p.last_wave) return;
  if (!begins(v, p, StagePlace::kSecond)) return;
  add_weights(v, kAll,
              {.count = v.num_local_experts,
               .delay = second.delay,
               .pace = second.pace,
               .left_out = blocks - v.num_local_experts},
              queue);
}

/// What goes back to other hosts follows the second product by a block: where this rank is through
/// with a block, others of its host, whose rows it waits for, are about to be.
inline UNIEP_HD void add_returns(const PassView& v, const LaunchParts& p, const Track& second,
                                 TrackList& queue) {
  Track back = second;
  back.mixed = false;
  ++back.delay;
  add_tracks(v, p, StagePlace::kReturn, back, queue);
}

/// Results of tokens: blocks `first` and following.
inline UNIEP_HD void add_results(const PassView& v, const LaunchParts& p, int first, int count,
                                 int delay, TrackList& queue) {
  const Track track{.first = first, .count = count, .delay = delay};
  add_tracks(v, p, StagePlace::kLast, track, queue);
}

/// Where tokens come in waves: of those that are complete behind a launch.
inline UNIEP_HD UNIEP_OUTLINED void add_results_of_waves(const PassView& v, const LaunchParts& p,
                                                         int index, TrackList& queue) {
  const int delay = queue.end();
  if (index < v.schedule.waves - 1) {
    const WaveRun early = waves_done_early(v, index);
    return add_results(v, p, early.first, early.count, delay, queue);
  }
  if (v.pass == Pass::kBackward) return add_results(v, p, 0, v.schedule.waves, delay, queue);
  add_results(v, p, 0, 1, delay, queue);
  add_results(v, p, v.schedule.waves - 1, 1, delay, queue);
}

/// A launch that the data goes through.
inline UNIEP_HD void add_data(const PassView& v, int index, int lag, Launch& launch) {
  const LaunchParts p = launch_parts(v, index);
  const bool computes = p.again || p.first || p.second;
  // With no dispatch workers what is fetched runs in the same queue, one block ahead of the tiles;
  // in a ring, where there may be no room for it, just ahead.
  const bool is_inline = p.fetch && computes && v.schedule.dispatch_workers == 0;
  const int delay = is_inline && v.ring_rows == 0 ? 1 : 0;
  const Track second = following_track(v, p, first_delay(v, p, delay, lag), lag);
  add_crossings(v, p, is_inline ? launch.main : launch.comm);
  add_fetch(v, p, lag, second, is_inline ? launch.main : launch.comm);
  if (computes) add_products(v, p, delay, lag, second, launch.main);
  if (v.has_hosts() && p.back) add_returns(v, p, second, launch.main);
  const bool after = v.schedule.wgrad == WgradPlacement::kAfter;
  if (after && begins(v, p, StagePlace::kLast)) {
    add_weights(v, kAll, {.count = v.num_local_experts, .delay = launch.main.end()}, launch.main);
  }
  if (v.comes_in_waves()) return add_results_of_waves(v, p, index, launch.main);
  add_results(v, p, 0, 1, launch.main.end(), launch.main);
}

}  // namespace detail

/// Launch number `index` of the pass, the second product `lag` blocks behind the first. Which
/// stages and how many of their blocks it holds does not depend on the lag. Made in place: on a GPU
/// in shared memory, since a local one would be larger than what a kernel's stack has room for.
inline UNIEP_HD void make_launch(const PassView& v, int index, int lag, Launch& launch) {
  launch.comm.count = launch.main.count = 0;
  const int data = detail::data_launches(v);
  if (index < data) return detail::add_data(v, index, lag, launch);
  const bool together = v.schedule.wgrad != WgradPlacement::kSeparate;
  detail::add_weights(v, together ? detail::kAll : index - data, {.count = v.num_local_experts},
                      launch.main);
}

/// The lag of a pass' launches. In a ring of rows all of an expert's tasks stand ahead of those
/// that write over its rows, and what is made again stands a lag ahead of the first product.
inline UNIEP_HD int launch_lag(const PassView& v) {
  if (!v.moves_data()) return 0;
  if (v.ring_rows == 0) return lag_blocks(v);
  const int hops = detail::stages_at(v, StagePlace::kAgain) > 0 ? 2 : 1;
  return min_of(lag_blocks(v), most_ring_lag(v) / hops);
}

/// Launch number `index` of the pass.
inline UNIEP_HD Launch launch_at(const PassView& v, int index) {
  Launch launch;
  make_launch(v, index, launch_lag(v), launch);
  return launch;
}

/// What a launch holds, where the view's arrays are out of reach, as are a GPU's on the host.
inline UNIEP_HD Launch launch_contents(const PassView& v, int index) {
  Launch launch;
  make_launch(v, index, 0, launch);
  return launch;
}

}  // namespace uniep
