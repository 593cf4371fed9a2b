#pragma once

#include "schedule/block_tasks.h"
#include "schedule/row_ring.h"

// What tasks wait for, and what they signal. Which counters a stage has to do with is said by its
// row of the graph; what one counter of a kind stands for (CounterOf) says the rest. A backend that
// signals for many rows, or peers, at a time in as many threads uses the functions for one of each.

namespace uniep {

struct Wait {
  CounterKind kind;
  std::int64_t index;
  std::uint32_t expected;  // above the pass's base
  int peer;                // the rank that signals it
  int owner = -1;          // whose counter it is; -1: this rank's
};

struct Signal {
  CounterKind kind;
  int rank;  // whose counter
  std::int64_t index;
  std::uint32_t amount;
};

/// Rows that dispatch brings among rows [begin, begin + rows_per_counter) of the expert's segment.
inline UNIEP_HD std::uint32_t coming_rows(const PassView& v, int expert, std::int64_t begin) {
  const std::int64_t end = v.segment_begin[expert] + v.dispatched_per_expert[expert];
  return static_cast<std::uint32_t>(clamp_to<std::int64_t>(end - begin, 0, v.rows_per_counter()));
}

/// For the tokens of one rank, as far as it has published them.
inline UNIEP_HD Wait source_wait(const PassView& v, CounterKind kind, int source) {
  return {kind, source, v.published, source};
}

/// Calls f(Wait) for every rank whose tokens a run of pulls needs.
template <class F>
UNIEP_HD void for_each_source_wait(const PassView& v, CounterKind kind, const Task& task, F&& f) {
  int last = -1;
  for (std::int64_t i = task.first_pull(); i < task.end_pull(); ++i) {
    const int source = v.pulls[i].source;
    if (kMayHaveHosts && !v.is_here(source)) continue;
    if (source != last) f(source_wait(v, kind, source));
    last = source;
  }
}

/// Calls f(Wait) for the rows of a tile.
template <class F>
UNIEP_HD void for_each_row_wait(const PassView& v, CounterKind kind, const Task& task, F&& f) {
  const Tile& tile = v.tiles[task.m];
  const std::int64_t step = v.rows_per_counter();
  const std::uint32_t a_row = v.counter(kind).per_unit;
  for (std::int64_t row = tile.first_row / step * step; row < tile.first_row + tile.rows;
       row += step) {
    f(Wait{kind, row / step, a_row * coming_rows(v, tile.expert, row), v.rank});
  }
}

/// Calls f(Wait) for every rank that pushes to the token block.
template <class F>
UNIEP_HD void for_each_arrival_wait(const PassView& v, CounterKind kind, const Task& task, F&& f) {
  const std::int64_t a_slot = v.counter(kind).per_unit;
  for (int peer = 0; peer < v.num_ranks; ++peer) {
    const std::int64_t index = task.m * v.num_ranks + peer;
    const auto all = static_cast<std::uint32_t>(v.slots_to_peer[index] * a_slot);
    if (all > 0) f(Wait{kind, index, all, peer});
  }
}

/// Calls f(Wait) for the pieces in which tokens of other hosts come that a run of pulls needs.
template <class F>
UNIEP_HD void for_each_crossing_wait(const PassView& v, CounterKind kind, const Task& task, F&& f) {
  std::int64_t last = -1;
  for (std::int64_t i = task.first_pull(); i < task.end_pull(); ++i) {
    const int source = v.pulls[i].source;
    if (v.is_here(source)) continue;
    const std::int32_t piece = v.across->crossing[i];
    const std::int64_t index = v.crossing_index(source, piece);
    if (index != last) f(Wait{kind, index, v.crossing_tokens(source, piece), source});
    last = index;
  }
}

/// The rank whose tokens a task of relay is of: the one of this rank's rail on the task's host.
inline UNIEP_HD int relayed_source(const PassView& v, const Task& task) {
  return v.layout.relay(v.rank, task.host());
}

/// Calls f(Wait) for the ranks of this host that push rows which a task of relay sends back. A sum
/// has rows of earlier blocks, too.
template <class F>
UNIEP_HD void for_each_push_wait(const PassView& v, CounterKind kind, const Task& task, F&& f) {
  const std::int64_t last = host_part(task).piece;
  for (std::int64_t piece = v.choice.sums_cross ? 0 : last; piece <= last; ++piece) {
    for (int local = 0; local < v.layout.local_ranks; ++local) {
      const std::int64_t of_host = task.n * v.num_pieces() + piece;
      const std::int32_t rows = v.across->pushed_rows[of_host * v.layout.local_ranks + local];
      const std::uint32_t all = v.counter(kind).per_unit * static_cast<std::uint32_t>(rows);
      const int peer = v.layout.rank_at(v.layout.host_of(v.rank), local);
      if (all > 0) {
        f(Wait{kind, piece * v.num_ranks + peer, all, peer, relayed_source(v, task)});
      }
    }
  }
}

/// Calls f(Wait) for the hosts from which rows of the token block, or their sums, come back.
template <class F>
UNIEP_HD void for_each_return_wait(const PassView& v, CounterKind kind, const Task& task, F&& f) {
  for (int host = 0; host < v.layout.hosts; ++host) {
    const std::int64_t index = task.m * v.layout.hosts + host;
    const auto all = static_cast<std::uint32_t>(v.across->coming_back[index]);
    if (all > 0) f(Wait{kind, index, all, v.layout.relay(v.rank, host)});
  }
}

/// Until all is done that an expert's rows are read by.
inline UNIEP_HD Wait uses_wait(const PassView& v, CounterKind kind, int expert) {
  const CounterView& counter = v.counter(kind);
  const auto rows = static_cast<std::uint32_t>(v.tokens_per_expert[expert]);
  const std::uint32_t tiles = ceil_div(rows, static_cast<std::uint32_t>(v.schedule.tile_m));
  return {kind, expert, tiles * counter.per_unit + counter.per_expert, v.rank};
}

/// Calls f(Wait) for every expert whose places in a ring of rows this one has next.
template <class F>
UNIEP_HD void for_each_release_wait(const PassView& v, CounterKind kind, int expert, F&& f) {
  for_each_expert_before(v, expert, [&](int before) { f(uses_wait(v, kind, before)); });
}

/// Calls f(Wait) for all counters of a kind that the task waits for. Code that is compiled for
/// passes without a ring of rows says so.
template <bool kMayHaveRing = true, class F>
UNIEP_HD void for_each_wait(const PassView& v, CounterKind kind, const Task& task, F&& f) {
  const CounterView& counter = v.counter(kind);
  if (counter.per_unit == 0) return;  // the part that signals it has come to its end
  switch (counter.of) {
    case CounterOf::kSource:
      if constexpr (kMayHaveHosts) {
        if (v.stage(task.stage).grid == TileGrid::kCrossings)
          return f(source_wait(v, kind, v.rank));
      }
      return for_each_source_wait(v, kind, task, f);
    case CounterOf::kRowGroup:
      return for_each_row_wait(v, kind, task, f);
    case CounterOf::kTile:
      return f(Wait{kind, task.m, counter.per_unit, v.rank});
    case CounterOf::kExpert: {
      const auto rows = static_cast<std::uint32_t>(v.tokens_per_expert[task.expert]);
      const auto tile_m = static_cast<std::uint32_t>(v.schedule.tile_m);
      if (rows > 0) f(Wait{kind, task.expert, ceil_div(rows, tile_m) * counter.per_unit, v.rank});
      return;
    }
    case CounterOf::kExpertRows: {
      const auto rows = static_cast<std::uint32_t>(v.dispatched_per_expert[task.expert]);
      if (rows > 0) f(Wait{kind, task.expert, rows * counter.per_unit, v.rank});
      return;
    }
    case CounterOf::kExpertUses:
      if constexpr (kMayHaveRing) for_each_release_wait(v, kind, task.expert, f);
      return;
    case CounterOf::kTokenBlock:
      return for_each_arrival_wait(v, kind, task, f);
    case CounterOf::kCrossing:
      if constexpr (kMayHaveHosts) for_each_crossing_wait(v, kind, task, f);
      return;
    case CounterOf::kPiece:
      if constexpr (kMayHaveHosts) for_each_push_wait(v, kind, task, f);
      return;
    case CounterOf::kReturn:
      if constexpr (kMayHaveHosts) for_each_return_wait(v, kind, task, f);
      return;
  }
}

/// Calls f(Wait) for everything that must have happened before the task may run.
template <bool kMayHaveRing = true, class F>
UNIEP_HD void for_each_wait(const PassView& v, const Task& task, F&& f) {
  for_each_counter(v.stage(task.stage).waits,
                   [&](CounterKind kind) { for_each_wait<kMayHaveRing>(v, kind, task, f); });
}

/// Tells `peer` that this rank's tokens can be pulled.
inline UNIEP_HD Signal source_signal(const PassView& v, CounterKind kind, int peer) {
  return {kind, peer, v.rank, 1};
}

/// The expert that has this row: the last whose segment begins at or before it.
inline UNIEP_HD int expert_of_row(const PassView& v, std::int32_t row) {
  int low = 0;
  int high = v.num_local_experts - 1;
  while (low < high) {
    const int mid = (low + high + 1) / 2;
    if (v.segment_begin[mid] <= row) {
      low = mid;
    } else {
      high = mid - 1;
    }
  }
  return low;
}

/// The signal of one row that a pull has brought: to a counter of kRowGroup ...
inline UNIEP_HD Signal row_group_signal(const PassView& v, CounterKind kind, std::int32_t row) {
  return {kind, v.rank, row >> log2_of(static_cast<std::uint32_t>(v.rows_per_counter())), 1};
}
/// ... or to whichever it is.
inline UNIEP_HD Signal row_signal(const PassView& v, CounterKind kind, std::int32_t row) {
  if (v.counter(kind).of != CounterOf::kExpertRows) return row_group_signal(v, kind, row);
  return {kind, v.rank, expert_of_row(v, row), 1};
}

/// The signal of one task on a tile of rows, `tile` of this expert.
inline UNIEP_HD Signal tile_signal(const PassView& v, CounterKind kind, std::int64_t tile,
                                   int expert) {
  return {kind, v.rank, v.counter(kind).of == CounterOf::kExpert ? expert : tile, 1};
}

/// The signal of one task that has read rows of this expert.
inline UNIEP_HD Signal use_signal(const PassView& v, CounterKind kind, int expert) {
  return {kind, v.rank, expert, 1};
}

/// The block that a token's arrivals are counted in.
inline UNIEP_HD int token_block(const PassView& v, const RowOrigin& origin) {
  return origin.token / v.schedule.token_block;
}

/// The signal of `elements` that were pushed for tokens of one rank's token block.
inline UNIEP_HD Signal arrival_signal(const PassView& v, CounterKind kind, int rank, int block,
                                      std::uint32_t elements) {
  return {kind, rank, std::int64_t{block} * v.num_ranks + v.rank, elements};
}

/// Calls f(Signal) for every run of rows that goes to one token block of one rank: in the canonical
/// order of rows these are neighbours.
template <class F>
UNIEP_HD void for_each_arrival_signal(const PassView& v, CounterKind kind, const Task& task,
                                      F&& f) {
  const Tile& tile = v.tiles[task.m];
  const std::int64_t cols = column_tile(stage_grid(v, task.stage), task.n).count;
  for (std::int64_t i = 0; i < tile.rows;) {
    const RowOrigin& first = v.row_origin[tile.first_row + i];
    const int block = token_block(v, first);
    std::int64_t run = 1;
    for (; i + run < tile.rows; ++run) {
      const RowOrigin& next = v.row_origin[tile.first_row + i + run];
      if (next.source != first.source || token_block(v, next) != block) break;
    }
    if (v.is_here(first.source)) {
      f(arrival_signal(v, kind, first.source, block, static_cast<std::uint32_t>(run * cols)));
    }
    i += run;
  }
}

/// The block that has this tile.
inline UNIEP_HD int block_of_tile(const PassView& v, std::int64_t tile) {
  int block = 0;
  while (v.tile_begin[block + 1] <= tile) ++block;
  return block;
}

/// Calls f(Signal) for every rank of another host that rows of a tile are of.
template <class F>
UNIEP_HD void for_each_push_signal(const PassView& v, CounterKind kind, const Task& task, F&& f) {
  const Tile& tile = v.tiles[task.m];
  const std::int64_t cols = column_tile(stage_grid(v, task.stage), task.n).count;
  const std::int64_t index = std::int64_t{block_of_tile(v, task.m)} * v.num_ranks + v.rank;
  for (std::int64_t i = 0; i < tile.rows;) {
    const int source = v.row_origin[tile.first_row + i].source;
    std::int64_t run = 1;
    while (i + run < tile.rows && v.row_origin[tile.first_row + i + run].source == source) ++run;
    if (!v.is_here(source)) f(Signal{kind, source, index, static_cast<std::uint32_t>(run * cols)});
    i += run;
  }
}

/// Calls f(Signal) for the ranks of the host that a task has sent tokens to.
template <class F>
UNIEP_HD void for_each_crossing_signal(const PassView& v, CounterKind kind, const Task& task,
                                       F&& f) {
  const auto [begin, end] = host_items(v, task);
  const std::int64_t index = v.crossing_index(v.rank, host_part(task).piece);
  for (int local = 0; local < v.layout.local_ranks; ++local) {
    const int rank = v.layout.rank_at(task.host(), local);
    f(Signal{kind, rank, index, static_cast<std::uint32_t>(end - begin)});
  }
}

/// Calls f(Signal) for every block of tokens of which a task of relay has sent rows or sums back.
template <class F>
UNIEP_HD void for_each_return_signal(const PassView& v, CounterKind kind, const Task& task, F&& f) {
  const auto [begin, end] = host_items(v, task);
  const auto block_of = [&](std::int64_t i) {
    return v.across->returned[i].token / v.schedule.token_block;
  };
  for (std::int64_t i = begin; i < end;) {
    const std::int64_t first = i;
    while (i < end && block_of(i) == block_of(first)) ++i;
    const std::int64_t index =
        std::int64_t{block_of(first)} * v.layout.hosts + v.layout.host_of(v.rank);
    f(Signal{kind, relayed_source(v, task), index, static_cast<std::uint32_t>(i - first)});
  }
}

/// Calls f(Signal) for all counters of a kind that the finished task advances.
template <class F>
UNIEP_HD void for_each_signal(const PassView& v, CounterKind kind, const Task& task, F&& f) {
  switch (v.counter(kind).of) {
    case CounterOf::kSource:
      for (int peer = 0; peer < v.num_ranks; ++peer) {
        if (v.is_here(peer)) f(source_signal(v, kind, peer));
      }
      return;
    case CounterOf::kRowGroup:
    case CounterOf::kExpertRows:
      for (std::int64_t i = task.first_pull(); i < task.end_pull(); ++i) {
        for (int c = 0; c < v.pulls[i].num_rows; ++c) {
          const std::int64_t row = v.pull_rows[v.pulls[i].first_row + c];
          f(row_signal(v, kind, static_cast<std::int32_t>(row)));
        }
      }
      return;
    case CounterOf::kTile:
    case CounterOf::kExpert:
      return f(tile_signal(v, kind, task.m, v.tiles[task.m].expert));
    case CounterOf::kExpertUses:
      return f(use_signal(v, kind, task.expert));
    case CounterOf::kTokenBlock:
      return for_each_arrival_signal(v, kind, task, f);
    case CounterOf::kCrossing:
      if constexpr (kMayHaveHosts) for_each_crossing_signal(v, kind, task, f);
      return;
    case CounterOf::kPiece:
      if constexpr (kMayHaveHosts) for_each_push_signal(v, kind, task, f);
      return;
    case CounterOf::kReturn:
      if constexpr (kMayHaveHosts) for_each_return_signal(v, kind, task, f);
      return;
  }
}

/// Calls f(Signal) for every counter that the finished task advances.
template <class F>
UNIEP_HD void for_each_signal(const PassView& v, const Task& task, F&& f) {
  for_each_counter(v.stage(task.stage).signals,
                   [&](CounterKind kind) { for_each_signal(v, kind, task, f); });
}

}  // namespace uniep
