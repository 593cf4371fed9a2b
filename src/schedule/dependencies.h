#pragma once

#include "schedule/queue.h"

namespace uniep {

/// The counters through which tasks tell one another that data is ready. docs/counters.md argues
/// why they suffice. Counts only grow; a pass counts from the value that it found (its base). In
/// the order of the pass: the counters that a stage waits for stand before those of later stages.
enum class CounterKind : int {
  kPublished,   ///< [source rank], on every rank: the source's tokens can be pulled
  kRowsReady,   ///< [row / rows_per_counter]: rows dispatched
  kTileDone,    ///< [tile]: column tiles of the first GEMM stage done
  kExpertDone,  ///< [local expert]: tiles of dfc2 done
  kArrived,     ///< [token block, pushing rank], on the tokens' rank: elements pushed
};
inline constexpr int kNumCounterKinds = 5;

constexpr const char* name(CounterKind kind) {
  constexpr const char* kNames[kNumCounterKinds] = {"published", "rows_ready", "tile_done",
                                                    "expert_done", "arrived"};
  return kNames[static_cast<int>(kind)];
}

struct Wait {
  CounterKind kind;
  std::int64_t index;
  std::uint32_t expected;  // above the pass's base
  int peer;                // the rank that signals it
};

struct Signal {
  CounterKind kind;
  int rank;  // whose counter
  std::int64_t index;
  std::uint32_t amount;
};

/// Real rows among rows [begin, begin + rows_per_counter) of the expert's segment.
inline UNIEP_HD std::uint32_t real_rows(const PassView& v, int expert, std::int64_t begin) {
  const std::int64_t end = v.segment_begin[expert] + v.tokens_per_expert[expert];
  return static_cast<std::uint32_t>(clamp_to<std::int64_t>(end - begin, 0, v.rows_per_counter()));
}

/// Calls f(Wait) for everything that must have happened before the task may run.
template <class F>
UNIEP_HD void for_each_wait(const PassView& v, const Task& task, F&& f) {
  switch (task.stage) {
    case Stage::kDispatch: {
      int last = -1;
      for (std::int64_t i = task.m; i < task.m + task.n; ++i) {
        const int source = v.pulls[i].source;
        if (source != last) f(Wait{CounterKind::kPublished, source, 1, source});
        last = source;
      }
      break;
    }
    case Stage::kFc1:
    case Stage::kDfc2: {
      const Tile& tile = v.tiles[task.m];
      const std::int64_t step = v.rows_per_counter();
      for (std::int64_t row = tile.first_row / step * step; row < tile.first_row + tile.rows;
           row += step) {
        f(Wait{CounterKind::kRowsReady, row / step, real_rows(v, tile.expert, row), v.rank});
      }
      break;
    }
    case Stage::kFc2:
    case Stage::kDfc1: {
      f(Wait{CounterKind::kTileDone, task.m, column_tiles(v, v.first_gemm()), v.rank});
      break;
    }
    case Stage::kWgrad2:
    case Stage::kWgrad1: {
      if (!v.moves_data()) break;  // the part that does has come to its end
      const auto rows = static_cast<std::uint32_t>(v.tokens_per_expert[task.expert]);
      const std::uint32_t all = ceil_div(rows, static_cast<std::uint32_t>(v.schedule.tile_m)) *
                                column_tiles(v, Stage::kDfc2);
      if (all > 0) f(Wait{CounterKind::kExpertDone, task.expert, all, v.rank});
      break;
    }
    case Stage::kReduce:
      for (int peer = 0; peer < v.num_ranks; ++peer) {
        const std::int64_t index = task.m * v.num_ranks + peer;
        const auto all = static_cast<std::uint32_t>(v.slots_to_peer[index] * v.hidden);
        if (all > 0) f(Wait{CounterKind::kArrived, index, all, peer});
      }
      break;
    default:
      break;
  }
}

/// Calls f(Signal) for every counter that the finished task advances. Rows of a tile are sorted by
/// (source, token), so those of one source's token block are one run, and one signal.
template <class F>
UNIEP_HD void for_each_signal(const PassView& v, const Task& task, F&& f) {
  switch (task.stage) {
    case Stage::kDispatch:
      for (std::int64_t i = task.m; i < task.m + task.n; ++i) {
        for (int c = 0; c < v.pulls[i].num_rows; ++c) {
          const std::int64_t row = v.pull_rows[v.pulls[i].first_row + c];
          f(Signal{CounterKind::kRowsReady, v.rank, row / v.rows_per_counter(), 1});
        }
      }
      break;
    case Stage::kDfc2:
      f(Signal{CounterKind::kTileDone, v.rank, task.m, 1});
      f(Signal{CounterKind::kExpertDone, v.rank, v.tiles[task.m].expert, 1});
      break;
    case Stage::kFc1:
      f(Signal{CounterKind::kTileDone, v.rank, task.m, 1});
      break;
    case Stage::kFc2:
    case Stage::kDfc1: {
      const Tile& tile = v.tiles[task.m];
      const std::int64_t cols = column_tile(stage_grid(v, task.stage), task.n).count;
      for (std::int64_t i = 0; i < tile.rows;) {
        const RowOrigin& origin = v.row_origin[tile.first_row + i];
        const int token_block = origin.token / v.schedule.token_block;
        std::int64_t run = 1;
        while (
            i + run < tile.rows && v.row_origin[tile.first_row + i + run].source == origin.source &&
            v.row_origin[tile.first_row + i + run].token / v.schedule.token_block == token_block) {
          ++run;
        }
        f(Signal{CounterKind::kArrived, origin.source,
                 static_cast<std::int64_t>(token_block) * v.num_ranks + v.rank,
                 static_cast<std::uint32_t>(run * cols)});
        i += run;
      }
      break;
    }
    default:
      break;
  }
}

}  // namespace uniep
