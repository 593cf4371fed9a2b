#pragma once

#include <cstdint>

#include "base/math.h"
#include "uniep/routing_plan.h"
#include "uniep/schedule.h"
#include "uniep/stage.h"

namespace uniep {

/// A backward pass may come in two parts, one after another: what other ranks wait for, and the
/// weight gradients, for which nobody does. The second part takes up the rows of the first.
enum class PassPart : int { kWhole, kData, kWeights };

/// Everything that decides which tasks one rank's pass has, in which order they stand, what each
/// waits for and what each signals. A trivially copyable view: the functions of launches.h, queue.h
/// and dependencies.h take nothing else, so the CPU backend, CUDA kernels, the simulator and tests
/// all run the same schedule.
///
/// A *block* is the tiles of one expert in one wave; block q = wave * num_local_experts + slot,
/// where expert_order[slot] is the expert. Tiles and pulls are stored in the order in which they
/// are taken, so block q owns a contiguous range of either.
struct PassView {
  Pass pass = Pass::kForward;
  PassPart part = PassPart::kWhole;
  Schedule schedule;

  int rank = 0;
  int num_ranks = 1;
  int num_local_experts = 0;
  int topk = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t tokens = 0;  // of this rank

  const std::int64_t* segment_begin = nullptr;      // [local experts + 1]
  const std::int64_t* tokens_per_expert = nullptr;  // [local experts]
  const std::int32_t* topk_ids = nullptr;           // of this rank, [tokens, K]
  const RowOrigin* row_origin = nullptr;            // [padded rows]
  const std::int64_t* pull_rows = nullptr;          // rows that a Pull's first_row points into

  const std::int32_t* expert_order = nullptr;   // [local experts]
  const Tile* tiles = nullptr;                  // in the order taken
  const std::int64_t* tile_begin = nullptr;     // [blocks + 1]
  const Pull* pulls = nullptr;                  // in the order needed
  const std::int64_t* pull_begin = nullptr;     // [blocks + 1]
  const std::int64_t* slots_to_peer = nullptr;  // [token blocks, ranks]: slots of own tokens there

  UNIEP_HD int num_blocks() const { return schedule.waves * num_local_experts; }
  UNIEP_HD std::int64_t num_token_blocks() const {
    return ceil_div<std::int64_t>(tokens, schedule.token_block);
  }
  UNIEP_HD int expert_of_block(int block) const { return expert_order[block % num_local_experts]; }

  /// Rows per readiness counter. Never more than a tile's: a tile that waited for rows of a later
  /// one could wait for a dispatch task that stands behind it in its own queue.
  UNIEP_HD int rows_per_counter() const { return min_of(schedule.ready_rows, schedule.tile_m); }

  /// Whether this part of the pass dispatches, and all that follows from it ...
  UNIEP_HD bool moves_data() const { return part != PassPart::kWeights; }
  /// ... and whether it computes weight gradients.
  UNIEP_HD bool has_weight_grads() const {
    return pass == Pass::kBackward && part != PassPart::kData;
  }

  /// The first GEMM stage of the pass (whose inputs dispatch brings) and the second (which pushes).
  UNIEP_HD Stage first_gemm() const { return pass == Pass::kForward ? Stage::kFc1 : Stage::kDfc2; }
  UNIEP_HD Stage second_gemm() const { return pass == Pass::kForward ? Stage::kFc2 : Stage::kDfc1; }
};

/// Rows and columns of a stage's output that are cut into tiles; rows of dispatched stages are cut
/// by Tile instead and have `rows` 0 here.
struct StageGrid {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t tile_cols = 0;
  std::int64_t reduction = 0;  // length of the sums; 0: the expert's rows (weight gradients)
};

/// An fc1 tile holds tile_n / 2 gate columns and the same tile_n / 2 up columns, so that SwiGLU
/// runs in its epilogue: it advances by tile_n / 2 columns of I.
inline UNIEP_HD StageGrid stage_grid(const PassView& v, Stage stage) {
  const std::int64_t n = v.schedule.tile_n;
  switch (stage) {
    case Stage::kFc1:
      return {0, v.intermediate, n / 2, v.hidden};
    case Stage::kDfc2:
      return {0, v.intermediate, n, v.hidden};
    case Stage::kFc2:
      return {0, v.hidden, n, v.intermediate};
    case Stage::kDfc1:
      return {0, v.hidden, n, 2 * v.intermediate};
    case Stage::kWgrad2:
      return {v.hidden, v.intermediate, n};
    case Stage::kWgrad1:
      return {2 * v.intermediate, v.hidden, n};
    default:
      return {};
  }
}

/// Columns [first, first + count) of a stage's output.
struct ColumnRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

/// Those of column tile `n`; the last one may be narrower.
inline UNIEP_HD ColumnRange column_tile(const StageGrid& grid, std::int64_t n) {
  const std::int64_t first = n * grid.tile_cols;
  return {first, min_of(grid.tile_cols, grid.cols - first)};
}

inline UNIEP_HD std::uint32_t column_tiles(const PassView& v, Stage stage) {
  const StageGrid grid = stage_grid(v, stage);
  return ceil_div(static_cast<std::uint32_t>(grid.cols),
                  static_cast<std::uint32_t>(grid.tile_cols));
}

}  // namespace uniep
