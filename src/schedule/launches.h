#pragma once

#include "base/outlined.h"
#include "graph/extents.h"
#include "schedule/row_ring.h"
#include "schedule/token_waves.h"
#include "schedule/tracks.h"

namespace uniep {

/// Launches that a pass can have: a wave each, and two more of the data path and two of wgrad.
inline constexpr int kMaxLaunches = static_cast<int>(kMostWaves) + 2 + 2;
static_assert(kMaxStages <= kMaxLaunches, "every stage can have a launch of its own");

namespace detail {

/// Which stages a launch holds, weight gradients aside, and how many of their blocks.
struct LaunchParts {
  // Places. Rows come back to other hosts where the second product is.
  bool dispatch = false, recompute = false, first = false, second = false, back = false,
       last = false;
  Stage only{};                              // where every stage has a launch of its own
  bool has_only = false;                     // that is so
  int dispatch_begin = 0, dispatch_end = 0;  // blocks
  int begin = 0, end = 0;                    // blocks of kRecompute, kFirst and kSecond
  bool last_wave = true;                     // no later launch has blocks of kSecond

  UNIEP_HD bool holds(Stage stage, StagePlace place) const {
    if (has_only && stage != only) return false;
    switch (place) {
      case StagePlace::kCross:
      case StagePlace::kDispatch:
      case StagePlace::kRedispatch:
        return dispatch;
      case StagePlace::kRecompute:
        return recompute;
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
  LaunchParts p{.dispatch_end = blocks, .end = blocks};
  switch (v.schedule.launch) {
    case LaunchGrouping::kSeparate: {
      p.has_only = true;
      p.only = data_stage(v, index);
      const StagePlace place = v.stage(p.only).place;
      p.dispatch = place == StagePlace::kDispatch || place == StagePlace::kRedispatch ||
                   place == StagePlace::kCross;
      p.recompute = place == StagePlace::kRecompute;
      p.first = place == StagePlace::kFirst;
      p.second = place == StagePlace::kSecond;
      p.back = place == StagePlace::kReturn;
      p.last = place == StagePlace::kLast;
      break;
    }
    case LaunchGrouping::kPipelined:
      p.dispatch = index < waves;
      p.dispatch_begin = index * experts;
      p.dispatch_end = (index + 1) * experts;
      p.recompute = p.first = p.second = p.back = index >= 1 && index <= waves;
      p.begin = (index - 1) * experts;
      p.end = index * experts;
      p.last_wave = index == waves;
      p.last = index == waves + 1;
      break;
    case LaunchGrouping::kPaired:
      p.dispatch = p.recompute = p.first = index == 0;
      p.second = p.back = p.last = index == 1;
      break;
    case LaunchGrouping::kSingle:
      p.dispatch = p.recompute = p.first = p.second = p.back = p.last = index == 0;
      break;
    case LaunchGrouping::kWaves:
      p.dispatch = p.recompute = p.first = p.second = p.back = true;
      p.begin = p.dispatch_begin = index * experts;
      p.end = p.dispatch_end = (index + 1) * experts;
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

/// Launches of this part of the pass that begin with something else than weight gradients.
inline UNIEP_HD int data_launches(const PassView& v) {
  return v.moves_data() ? launches_of_data(v) : 0;
}

/// Launches of nothing but weight gradients, after these: one for all of them, if no other launch
/// holds them.
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

/// Blocks by which the second product follows the first where they share a launch, and the first
/// what is recomputed for it: `lag` experts, or more if it takes more to hold `lag_tiles` tiles of
/// the first, at the rank's average.
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
/// they begin `head_start` percent of all later, or `lag` if that is more, and have come up to the
/// lag when they end.
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

/// Whether the launch computes something of forward again for the first product, `lag` before it.
inline UNIEP_HD bool recomputes(const PassView& v, const LaunchParts& p) {
  return p.recompute && !p.has_only && stages_at(v, StagePlace::kRecompute) > 0;
}

/// Where a launch that dispatches `dispatch`, and whose second product is `second`, dispatches x
/// again. What the first product is recomputed from comes first. Otherwise only weight gradients
/// need x, and it must not delay the first product: a block's x comes beside its second product, if
/// that waits for it, or beside its weight gradients, or last.
inline UNIEP_HD Track redispatch_track(const PassView& v, const LaunchParts& p, Track dispatch,
                                       const Track& second) {
  if (!p.first || p.has_only || recomputes(v, p)) return dispatch;
  const bool beside = (v.num_ranks > 1 && v.choice.drops_received) ||
                      v.schedule.wgrad == WgradPlacement::kInterleaved;
  if (p.second && beside && second.first == dispatch.first && second.count == dispatch.count) {
    dispatch.delay = second.delay;
    dispatch.pace = second.pace;
  } else {
    dispatch.delay += dispatch.count;
  }
  return dispatch;
}

/// Adds what is dispatched, and dispatched again.
inline UNIEP_HD void add_dispatch(const PassView& v, const LaunchParts& p, int lag,
                                  const Track& second, TrackList& queue) {
  Track dispatch{.first = p.dispatch_begin, .count = p.dispatch_end - p.dispatch_begin};
  const Track redispatch = redispatch_track(v, p, dispatch, second);
  add_tracks(v, p, StagePlace::kRedispatch, redispatch, queue);
  if (p.dispatch_begin == p.begin && recomputes(v, p)) {
    dispatch.delay = min_of(lag, dispatch.count);
  }
  add_tracks(v, p, StagePlace::kDispatch, dispatch, queue);
}

/// Adds what other hosts need of this rank, of all waves, before everything that waits.
inline UNIEP_HD void add_crossings(const PassView& v, const LaunchParts& p, TrackList& queue) {
  if (!v.has_hosts() || p.dispatch_begin > 0) return;
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

/// The step with which the first product begins.
inline UNIEP_HD int first_delay(const PassView& v, const LaunchParts& p, int delay, int lag) {
  return delay + (recomputes(v, p) ? min_of(lag, p.end - p.begin) : 0);
}

/// Adds both products, before them what is recomputed for the first, and the weight gradients that
/// are interleaved with them: an expert's need its rows of every wave, so they follow its last
/// block.
inline UNIEP_HD void add_products(const PassView& v, const LaunchParts& p, int delay, int lag,
                                  const Track& second, TrackList& queue) {
  const int blocks = p.end - p.begin;
  const Track first{.first = p.begin,
                    .count = blocks,
                    .delay = first_delay(v, p, delay, lag),
                    .mixed = second.mixed};
  add_tracks(v, p, StagePlace::kRecompute, {.first = p.begin, .count = blocks, .delay = delay},
             queue);
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

/// Adds what goes back to other hosts, a block after the second product: when this rank is through
/// with a block, so are soon the others of its host, whose rows it waits for.
inline UNIEP_HD void add_returns(const PassView& v, const LaunchParts& p, const Track& second,
                                 TrackList& queue) {
  Track back = second;
  back.mixed = false;
  ++back.delay;
  add_tracks(v, p, StagePlace::kReturn, back, queue);
}

/// Adds results of tokens: blocks `first` and following.
inline UNIEP_HD void add_results(const PassView& v, const LaunchParts& p, int first, int count,
                                 int delay, TrackList& queue) {
  const Track track{.first = first, .count = count, .delay = delay};
  add_tracks(v, p, StagePlace::kLast, track, queue);
}

/// Adds results of the waves of tokens that are complete after launch `index`.
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

/// Fills a launch that the data goes through.
inline UNIEP_HD void add_data(const PassView& v, int index, int lag, Launch& launch) {
  const LaunchParts p = launch_parts(v, index);
  const bool computes = p.recompute || p.first || p.second;
  // With no dispatch workers dispatch is in the same queue, one block before the tiles; in a ring,
  // which may have no room for it, just before them.
  const bool is_inline = p.dispatch && computes && v.schedule.dispatch_workers == 0;
  const int delay = is_inline && v.ring_rows == 0 ? 1 : 0;
  const Track second = following_track(v, p, first_delay(v, p, delay, lag), lag);
  add_crossings(v, p, is_inline ? launch.main : launch.comm);
  add_dispatch(v, p, lag, second, is_inline ? launch.main : launch.comm);
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

/// Launch number `index` of the pass, the second product `lag` blocks after the first. Which
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

/// The lag of a pass' launches. In a ring of rows all of an expert's tasks stand before those that
/// write over its rows, and what is recomputed stands a lag before the first product.
inline UNIEP_HD int launch_lag(const PassView& v) {
  if (!v.moves_data()) return 0;
  if (v.ring_rows == 0) return lag_blocks(v);
  const int hops = detail::stages_at(v, StagePlace::kRecompute) > 0 ? 2 : 1;
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
