#pragma once

#include "schedule/token_waves.h"

// In which order experts stand and their tiles are taken: the rules that PassOrder follows on the
// host and the order kernel on a GPU, which sort and search each in their own way.

namespace uniep {

/// Whether an expert with so many rows stands ahead of another in `expert_order`; of experts with
/// as many, the one with the lower number does. Shared experts stand ahead of all others: their
/// rows come from this rank, so their tiles fill the time until the first rows of peers are here.
/// Not in a ring of rows, whose experts take turns by number.
inline UNIEP_HD bool stands_before(const PassView& v, std::int64_t rows, int expert,
                                   std::int64_t other_rows, int other) {
  if (v.ring_rows == 0 && v.is_shared(expert) != v.is_shared(other)) return v.is_shared(expert);
  switch (v.schedule.expert_order) {
    case ExpertOrder::kHeavyFirst:
      return rows != other_rows ? rows > other_rows : expert < other;
    case ExpertOrder::kLightFirst:
      return rows != other_rows ? rows < other_rows : expert < other;
    case ExpertOrder::kIndex:
      break;
  }
  return expert < other;
}

/// The rank with whose rows each expert begins.
inline UNIEP_HD int starting_source(const PassView& v) {
  switch (v.schedule.rotate) {
    case SourceRotation::kOwnFirst:
      return v.rank;
    case SourceRotation::kNextFirst:
      return (v.rank + 1) % v.num_ranks;
    case SourceRotation::kNone:
      break;
  }
  return 0;
}

/// By its number in the order of tokens: an expert's first tile is the one that holds the first row
/// of this token or a later one, and behind its last tile follow those before that.
inline UNIEP_HD std::int64_t starting_token(const PassView& v) {
  return token_order(v).number(starting_source(v), 0);
}

/// How many of an expert's `count` tiles waves before this one take.
inline UNIEP_HD std::int64_t wave_begin(const PassView& v, std::int64_t count, int wave) {
  return count * wave / v.schedule.waves;
}

/// How many of an expert's tiles waves before this one take; they may be waves of tokens.
inline UNIEP_HD std::int64_t wave_begin(const PassView& v, int expert, std::int64_t count,
                                        int wave) {
  if (v.comes_in_waves()) return token_wave_begin(v, expert, count, wave);
  return wave_begin(v, count, wave);
}

/// When a tile of an expert is taken, of its `count`, beginning with tile `start`.
inline UNIEP_HD std::int64_t place_of_tile(std::int64_t tile, std::int64_t start,
                                           std::int64_t count) {
  return tile >= start ? tile - start : tile - start + count;
}

/// The wave that takes the tile at a place.
inline UNIEP_HD int wave_of(const PassView& v, std::int64_t count, std::int64_t place) {
  int wave = 0;
  while (wave_begin(v, count, wave + 1) <= place) ++wave;
  return wave;
}

}  // namespace uniep
