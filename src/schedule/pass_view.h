#pragma once

#include <cstdint>

#include "base/contract.h"
#include "base/expert_numbers.h"
#include "base/math.h"
#include "graph/extents.h"
#include "graph/graph.h"
#include "layout/page_shape.h"
#include "uniep/rank_layout.h"
#include "uniep/routing_plan.h"
#include "uniep/schedule.h"
#include "uniep/stage.h"

namespace uniep {

/// Kernels are compiled for groups of one host alone.
#ifdef __CUDA_ARCH__
inline constexpr bool kMayHaveHosts = false;
#else
inline constexpr bool kMayHaveHosts = true;
#endif

/// A backward pass may come in two parts, one after another: what other ranks wait for, and the
/// weight gradients, for which nobody does. The second part takes up the rows of the first.
enum class PassPart : int { kWhole, kData, kWeights };

/// Rows and columns of a stage's output that are cut into tiles; rows of dispatched stages are cut
/// by Tile instead and have `rows` 0 here.
struct StageGrid {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t tile_cols = 0;
  std::int64_t reduction = 0;  // length of the sums; 0: the expert's rows (weight gradients)
};

/// Bytes that tasks of a stage, or of a whole pass, move between ranks.
struct WireBytes {
  std::int32_t pulled_token = 0;    // of a token
  std::int32_t pulled_row = 0;      // and for each of its rows
  std::int32_t pushed_element = 0;  // of a column of a row
  std::int32_t pushed_row = 0;      // with the first columns of each row
};

/// A stage of the pass at hand: the StageRow of the graph, with its sizes in numbers.
struct StageView {
  std::int32_t rows = 0;
  std::int32_t cols = 0;
  std::int32_t tile_cols = 0;
  std::int32_t reduction = 0;
  std::uint32_t column_tiles = 0;
  std::int32_t unit_bytes = 0;  // of a move or sum: moved for each row, or token
  std::int32_t pull_bytes = 0;  // of a move: and kept of each token that is pulled
  std::uint8_t halves = 1;
  std::uint8_t element_bytes[3] = {};  // of a product: left and right operand, output
  StageKind kind = StageKind::kMove;
  StageSide side = StageSide::kLocal;
  TileGrid grid = TileGrid::kNone;
  StagePlace place = StagePlace::kEnter;
  Stage like = Stage::kPlan;
  CounterSet waits = 0;
  CounterSet signals = 0;
  WireBytes wire{};
};

/// A kind of counters in the pass at hand.
struct CounterView {
  CounterOf of = CounterOf::kTile;
  /// What the stages that signal it add to one counter for each unit that it stands for: for each
  /// row, tile of rows or slot of a token. 0: nothing of this part of the pass signals it.
  std::uint32_t per_unit = 0;
  std::uint32_t per_expert = 0;  // kExpertUses: and by weight gradients of an expert
};

/// A row that goes back to another host's rank, or a sum of rows of a combine group.
struct ReturnedRow {
  std::int32_t token = 0;
  std::int32_t slot = 0;  // of K; of a sum: the first of its rows
};

/// What a rank of a group of several hosts also knows. Tokens and rows cross between hosts in
/// pieces (PassView::num_pieces), made by crossings.h and returns.h.
struct HostTables {
  const std::int32_t* all_topk_ids = nullptr;  // [tokens of all ranks, K], rank after rank
  const std::int64_t* first_token = nullptr;   // [ranks + 1]: of each rank in there
  const std::int32_t* crossing = nullptr;      // [pulls]: which piece brings it; -1: of this host
  const std::int32_t* crossing_tokens = nullptr;  // [ranks, pieces]: tokens that each brings here
  const std::int32_t* sent_tokens = nullptr;      // own ones that others need, by host and piece
  const std::int64_t* sent_begin = nullptr;       // [hosts * pieces + 1]
  const ReturnedRow* returned = nullptr;          // to the rail's ranks, by host and piece
  const std::int64_t* returned_begin = nullptr;   // [hosts * pieces + 1]
  // [hosts, pieces, local ranks]: rows for the rail's rank of a host that each rank pushes here
  const std::int32_t* pushed_rows = nullptr;
  const std::int32_t* coming_back = nullptr;  // [token blocks, hosts]: own rows and sums
};

/// Blocks [first, first + count) of a rank's tokens.
struct TokenBlocks {
  std::int32_t first = 0, count = 0;
};

/// Everything that decides which tasks one rank's pass has, in which order they stand, what each
/// waits for and what each signals. A trivially copyable view: the functions of launches.h, queue.h
/// and dependencies.h take nothing else, so the CPU backend, CUDA kernels, the simulator and tests
/// all run the same schedule.
///
/// A *block* is the tiles of one expert in one wave; block q = wave * num_local_experts +
/// position, where expert_order[position] is the expert. Tiles and pulls are stored in the order in
/// which they are taken, so block q owns a contiguous range of either.
struct PassView {
  Pass pass = Pass::kForward;
  PassPart part = PassPart::kWhole;
  Schedule schedule;
  GraphChoice choice{};  // of what the graph has
  Activation activation = Activation::kSwiglu;
  Probs probs = Probs::kBefore;
  int group_experts = 0;  // experts of a combine group; 0: all are one
  CombinePartials combine_partials = CombinePartials::kFp32;
  /// Rows that tensors of the call have room for, in a ring (row_ring.h); 0: for all.
  std::int32_t ring_rows = 0;

  int rank = 0;
  int num_ranks = 1;
  int num_local_experts = 0;  // the shared ones among them, behind the others
  int topk = 0;
  int slots = 0;  // of a token: of its K experts, then of the shared ones
  int shared_experts = 0;
  bool shared_gate = false;  // their rows have probabilities other than 1
  bool slot_rows = false;    // out and dx have a row for each slot
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t tokens = 0;  // of this rank

  // What the graph says of this part of the pass (pass_stages.h).
  StageView stages[kMaxStages] = {};         // by Stage
  std::int8_t stage_order[kMaxStages] = {};  // of those that queues hold, as the graph has them
  std::int8_t num_stages = 0;
  std::int8_t num_data_stages = 0;    // of all parts of the pass: those but weight gradients ...
  std::int8_t num_weight_stages = 0;  // ... and these
  CounterView counters[kMaxCounterKinds] = {};  // by CounterKind

  const std::int64_t* segment_begin = nullptr;      // [local experts + 1]
  const std::int64_t* tokens_per_expert = nullptr;  // [local experts]
  const std::int32_t* topk_ids = nullptr;           // of this rank, [tokens, K]
  const RowOrigin* row_origin = nullptr;            // [padded rows]
  const std::int64_t* pull_rows = nullptr;          // rows that a Pull's first_row points into
  /// The pages of a row pool that hold what is saved: of rows (saved_rows.h), by number of the row
  /// >> page_shape.shift, and of tokens (received_tokens.h). Null: they lie as they are numbered.
  const std::int32_t* pages = nullptr;
  PageShape page_shape{};
  const std::int32_t* pull_of_row = nullptr;  // [padded rows]: index in RoutingPlan::pulls

  const std::int32_t* expert_order = nullptr;  // [local experts]
  // [local experts]: rows that dispatch brings (tokens_in_place.h)
  const std::int64_t* dispatched_per_expert = nullptr;
  const Tile* tiles = nullptr;               // in the order taken
  const std::int64_t* tile_begin = nullptr;  // [blocks + 1]
  const Pull* pulls = nullptr;               // in the order needed
  const std::int64_t* pull_begin = nullptr;  // [blocks + 1]
  // [token blocks, ranks]: slots of own tokens there, on this host
  const std::int64_t* slots_to_peer = nullptr;

  // Tokens that are gathered, and come in waves (token_waves.h).
  int gathered_hosts = 1;
  int first_host = -1;
  std::int64_t most_tokens = 0;  // of a rank: of each host as many
  /// How often each rank has published tokens when the launch at hand may read them.
  std::uint32_t published = 1;
  TokenBlocks reduced[kMostWaves] = {};  // by block of reduce

  RankLayout layout{};
  const HostTables* across = nullptr;  // of groups of several hosts

  /// Experts of this rank that are not shared.
  UNIEP_HD int routed_experts() const { return num_local_experts - shared_experts; }
  UNIEP_HD bool is_shared(int expert) const { return expert >= routed_experts(); }
  UNIEP_HD int global_expert(int expert) const {
    return ExpertNumbers{routed_experts(), shared_experts}.global(rank, num_ranks, expert);
  }

  UNIEP_HD int num_blocks() const { return schedule.waves * num_local_experts; }

  UNIEP_HD bool has_hosts() const { return kMayHaveHosts && layout.hosts > 1; }
  UNIEP_HD bool is_here(int other) const { return !has_hosts() || layout.same_host(rank, other); }
  /// Tokens and rows cross between hosts in as many pieces: of each block the tokens that it is the
  /// first to need on its host, and the rows and sums that it completes.
  UNIEP_HD int num_pieces() const { return num_blocks(); }
  /// The number of a rank's piece among counters of kCrossing: the same in all passes, whatever
  /// their waves.
  UNIEP_HD std::int64_t crossing_index(int source, std::int64_t piece) const {
    return source * num_local_experts * kMostWaves + piece;
  }
  /// Tokens of a rank of another host that a piece brings to this one.
  UNIEP_HD std::uint32_t crossing_tokens(int source, std::int64_t piece) const {
    const std::int64_t at = std::int64_t{source} * num_pieces() + piece;
    return static_cast<std::uint32_t>(across->crossing_tokens[at]);
  }
  UNIEP_HD std::int64_t tokens_of(int source) const {
    return across->first_token[source + 1] - across->first_token[source];
  }
  /// The routing of a token of another rank.
  UNIEP_HD const std::int32_t* ids_of(int source, std::int64_t token) const {
    return across->all_topk_ids + (across->first_token[source] + token) * topk;
  }
  /// The rank of an expert that topk_ids name.
  UNIEP_HD int rank_of_expert(std::int32_t expert) const { return expert / routed_experts(); }
  /// Rows of out and dx that a token has.
  UNIEP_HD int result_rows() const { return slot_rows ? topk : 1; }
  UNIEP_HD std::int64_t num_token_blocks() const {
    return ceil_div<std::int64_t>(tokens, schedule.token_block);
  }
  /// Whether each wave has tokens of its own (token_waves.h), and a launch.
  UNIEP_HD bool comes_in_waves() const {
    return gathered_hosts > 1 && first_host >= 0 && schedule.launch == LaunchGrouping::kWaves;
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

  UNIEP_HD int halves() const { return is_gated(activation) ? 2 : 1; }
  /// Elements of a row of h.
  UNIEP_HD std::int64_t h_width() const { return halves() * intermediate; }

  UNIEP_HD const StageView& stage(Stage s) const { return stages[static_cast<int>(s)]; }
  UNIEP_HD const CounterView& counter(CounterKind k) const { return counters[static_cast<int>(k)]; }
  /// Number i of the stages that queues hold.
  UNIEP_HD Stage stage_at(int i) const { return static_cast<Stage>(stage_order[i]); }
};

inline UNIEP_HD StageGrid stage_grid(const PassView& v, Stage stage) {
  const StageView& s = v.stage(stage);
  return {s.rows, s.cols, s.tile_cols, s.reduction};
}

/// Numbers that the dprob of a row is the sum of.
inline UNIEP_HD std::int64_t dprob_sums(const PassView& v) {
  return dprob_sums(v.intermediate, v.choice.has_bias);
}

/// Columns [first, first + count) of a stage's output.
struct ColumnRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

/// The columns of column tile `n`; the last one may be narrower.
inline UNIEP_HD ColumnRange column_tile(const StageGrid& grid, std::int64_t n) {
  const std::int64_t first = n * grid.tile_cols;
  return {first, min_of(grid.tile_cols, grid.cols - first)};
}

inline UNIEP_HD std::uint32_t column_tiles(const PassView& v, Stage stage) {
  return v.stage(stage).column_tiles;
}

/// Tiles of a block of rows, in all columns, of the stages of a place.
inline UNIEP_HD std::uint32_t column_tiles(const PassView& v, StagePlace place) {
  std::uint32_t tiles = 0;
  for (int i = 0; i < v.num_stages; ++i) {
    const StageView& s = v.stage(v.stage_at(i));
    if (s.place == place) tiles += s.column_tiles;
  }
  return tiles;
}

/// Counters of that kind which this pass uses on its rank.
inline UNIEP_HD std::int64_t num_counters(const PassView& v, CounterOf of) {
  switch (of) {
    case CounterOf::kSource:
      return v.num_ranks;
    case CounterOf::kRowGroup:
      return ceil_div<std::int64_t>(v.segment_begin[v.num_local_experts], v.rows_per_counter());
    case CounterOf::kTile:
      // Segments are whole tiles long.
      return v.segment_begin[v.num_local_experts] / v.schedule.tile_m;
    case CounterOf::kExpert:
    case CounterOf::kExpertRows:
    case CounterOf::kExpertUses:
      return v.num_local_experts;
    case CounterOf::kTokenBlock:
      return v.num_token_blocks() * v.num_ranks;
    case CounterOf::kCrossing:
      return v.has_hosts() ? v.crossing_index(v.num_ranks, 0) : 0;
    case CounterOf::kPiece:
      return 0;  // only of ranks that this one stands in for
    case CounterOf::kReturn:
      return v.has_hosts() ? v.num_token_blocks() * v.layout.hosts : 0;
  }
  return 0;
}

}  // namespace uniep
