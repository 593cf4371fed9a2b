#pragma once

#include <cstdint>

#include "schedule/launches.h"

// How the tiles of two products take turns where their blocks meet in a queue (axis `mix_run`).
// docs/schedule.md has an example with numbers, tests/schedule/queue_test.cpp runs it.

namespace uniep {

/// Blocks of more tiles together are not mixed: either stage keeps all SMs busy for a while, with
/// operands that its own tiles share.
inline constexpr std::int64_t kMostMixedTiles = 1024;
/// Nor are more blocks, so that who walks through a queue need not look far ahead.
inline constexpr int kMostMixedBlocks = 8;

/// The order of tasks that are mixed. They are numbered as a queue's table lists them: `own` of the
/// first product's block, then those of the second product, `all` together.
struct Deal {
  std::uint32_t own = 0;
  std::uint32_t all = 0;
  std::uint32_t run = 1;  // of `own` tasks stand in a row

  /// The number of the task that stands at position `at`. A run ends where the share that is due of
  /// the first product, `own` of `all`, is whole; the second product has the positions left.
  UNIEP_HD std::uint32_t task_at(std::uint32_t at) const {
    std::uint32_t begun = 0;  // tasks of runs that have ended
    if (own > 0) {
      begun = mul_div(at, own, all) / run * run;
      const std::uint32_t end = min_of(begun + run, own);
      const std::uint32_t first = mul_div(end, all, own, own - 1) - (end - begun);  // of next run
      if (at >= first) return begun + at - first;
    }
    return own + at - begun;
  }
};

/// Which of its neighbours in a queue's table a block is mixed with. Mixed are a block of the first
/// product and the blocks of the second that are emitted at the same step, which the table lists
/// one after another.
class MixedBlocks {
 public:
  /// With none.
  MixedBlocks() = default;
  /// The mixed blocks of block number `i` of a track.
  static UNIEP_HD MixedBlocks of(const PassView& v, const TrackList& queue, int track, int i) {
    MixedBlocks mix;
    const Track& t = queue.tracks[track];
    if (!t.mixed) return mix;
    const int step = t.step_of(i);
    if (track + 1 < queue.count) mix.count_ = count_at(v, t, queue.tracks[track + 1], step);
    if (mix.count_ == 0 && track > 0) {
      mix.count_ = count_at(v, queue.tracks[track - 1], t, step);
      if (mix.count_ > 0) mix.place_ = static_cast<std::int16_t>(1 + i - t.blocks_before(step));
    }
    return mix;
  }

  UNIEP_HD bool any() const { return count_ > 0; }
  /// Whether the table lists the block ahead of all that it is mixed with ...
  UNIEP_HD bool is_first() const { return place_ == 0; }
  /// ... and behind all of them.
  UNIEP_HD bool is_last() const { return place_ + 1 >= count_; }

  /// Which task stands at `index` of the queue, as its number in the table: where it would stand if
  /// nothing were mixed. The table lists this block as number `entry`, and number `index` among its
  /// tasks. begin(i): tasks of the table ahead of block i. `run`: Schedule::mix_run.
  template <class Begin>
  UNIEP_HD std::int64_t listed_index(Begin&& begin, int entry, std::int64_t index, int run) const {
    if (count_ == 0) return index;
    const int head = first_of(entry);
    const std::int64_t first = begin(head);
    const Deal deal{.own = static_cast<std::uint32_t>(begin(head + 1) - first),
                    .all = static_cast<std::uint32_t>(begin(head + count_) - first),
                    .run = static_cast<std::uint32_t>(run)};
    return first + deal.task_at(static_cast<std::uint32_t>(index - first));
  }
  /// The table's number of the first of the blocks, given this one's.
  UNIEP_HD int first_of(int entry) const { return entry - place_; }

  friend bool operator==(const MixedBlocks&, const MixedBlocks&) = default;

 private:
  /// How many blocks are mixed at a step: the one of `first` and those of `second`; 0: none are.
  static UNIEP_HD std::int16_t count_at(const PassView& v, const Track& first, const Track& second,
                                        int step) {
    if (!first.mixed || !second.mixed || first.blocks_in(step) != 1) return 0;
    const int own = first.first + first.blocks_before(step);
    const int begin = second.first + second.blocks_before(step);
    const int end = second.first + second.blocks_before(step + 1);
    const int count = 1 + end - begin;
    if (end == begin || count > kMostMixedBlocks) return 0;
    const std::int64_t tiles =
        (v.tile_begin[own + 1] - v.tile_begin[own]) * column_tiles(v, first.stage) +
        (v.tile_begin[end] - v.tile_begin[begin]) * column_tiles(v, second.stage);
    return static_cast<std::int16_t>(tiles <= kMostMixedTiles ? count : 0);
  }

  std::int16_t count_ = 0;  // of blocks, this one included
  std::int16_t place_ = 0;  // of this one among them
};

}  // namespace uniep
