#pragma once

#include <cstdint>
#include <initializer_list>

#include "graph/element.h"
#include "uniep/problem.h"
#include "uniep/stage.h"

// A layer as data: the tensors that its passes read and write, the counters by which their tasks
// tell one another that data is ready, and the stages that the tasks are of. layer_graph.h has the
// one that this library runs; all that is said here follows from no other place: layouts of memory,
// waits, signals, launches, costs, bytes on the wire, tensor maps, what is drawn and documented.

namespace uniep {

// ---- tensors ----

/// The tensors of a layer, by name.
enum class Tensor : std::int8_t {
  kNone = -1,
  // What the caller brings and gets.
  kX,
  kTopkProbs,
  kDy,
  kW1,
  kW2,
  kOut,
  kDx,
  kDprobs,
  kDw1,
  kDw2,
  kB1,
  kB2,
  kDb1,
  kDb2,
  kSharedW1,
  kSharedW2,
  kSharedProbs,
  kDsharedProbs,
  kDsharedW1,
  kDsharedW2,
  // Where ranks reach one another.
  kTokens,
  kProbs,
  kCombine,
  kDprobSlots,
  kXTokens,
  kSums,
  // Rows, in the segments of their experts.
  kXRows,
  kReceived,
  kH,
  kRowProbs,
  kA,
  kDyRows,
  kDh,
  kDprobGroups
};
inline constexpr int kNumTensors = 34;
/// Places for tensors: some more, for graphs of tests.
inline constexpr int kMaxTensors = 36;

/// The sizes that shapes are made of.
enum class Extent : std::uint8_t {
  kOne,
  kHalves,        ///< 2: gate and up; 1 without a gate
  kTokens,        ///< T; in memory that is sized once: max_tokens
  kTopk,          ///< K
  kShared,        ///< S, shared experts
  kSlots,         ///< K + S, of a token
  kResultRows,    ///< rows of out and dx that a token has: 1, or K with Problem::slot_rows
  kHidden,        ///< H
  kIntermediate,  ///< I
  kBothHalves,    ///< 2I; I without a gate
  kRows,          ///< rows of this rank's experts, padding included; or the capacity for them
  kReceived,      ///< tokens that this rank's experts receive, each once; or room for them
  kLocalExperts,  ///< E / ranks; in counters S more
  kDprobGroups,   ///< column groups in which the dprobs of a row are summed (base/contract.h),
                  ///< and one for the part of b2
  kRanks,
  kTokenBlocks,  ///< most blocks of a rank's tokens, by the smallest `token_block`
  kRowGroups,    ///< most groups of rows, by the smallest `tile_m`
  kHosts         ///< hosts of the group, where there are several; 0 where there is one
};
inline constexpr int kNumExtents = 18;

/// What of the graph a layer has: which tensors and stages depends on what it does not keep between
/// its passes, on whether its experts have biases or some are shared, on whether backward works in
/// a ring of rows, and on whether its group is on several hosts.
struct GraphChoice {
  bool drops_x_rows = false;
  bool drops_h = false;
  bool drops_received = false;  ///< besides x_rows, the tokens that they are copies of
  bool has_bias = false;
  bool has_ring = false;    ///< Problem::backward_rows
  bool has_shared = false;  ///< Problem::shared_experts
  bool has_hosts = false;   ///< several of them
  bool sums_cross = false;  ///< between hosts, instead of the rows of each combine group ...
  bool fp32_sums = false;   ///< ... in fp32
};
/// Whether all experts of a combine group are on one host of several, and so add up a token's rows
/// there. With one group, or groups on several hosts, rows cross as they are.
constexpr bool sums_cross(const Problem& p, int hosts) {
  return hosts > 1 && p.combine_groups > 1 && p.combine_groups % hosts == 0;
}
constexpr GraphChoice choice_of(const Problem& p, int hosts = 1) {
  return {.drops_x_rows = p.save != Save::kRows,
          .drops_h = p.recompute_h,
          .drops_received = p.save == Save::kNone,
          .has_bias = p.bias,
          .has_ring = p.backward_rows > 0,
          .has_shared = p.shared_experts > 0,
          .has_hosts = hosts > 1,
          .sums_cross = sums_cross(p, hosts),
          .fp32_sums = sums_cross(p, hosts) && p.combine_partials == CombinePartials::kFp32};
}
/// Whether forward keeps the tokens that came in place of their rows.
constexpr UNIEP_HD bool keeps_received(GraphChoice choice) {
  return choice.drops_x_rows && !choice.drops_received;
}

/// When a row of the graph holds.
enum class When : std::uint8_t {
  kAlways,
  kNever,
  kXRowsDropped,
  kReceivedDropped,
  kReceivedKept,
  kHDropped,
  kHasBias,
  kInRing,
  kHasShared,
  kHosts,
  kFp32Sums
};
constexpr bool holds(When when, GraphChoice choice) {
  switch (when) {
    case When::kAlways:
      return true;
    case When::kNever:
      return false;
    case When::kXRowsDropped:
      return choice.drops_x_rows;
    case When::kReceivedDropped:
      return choice.drops_received;
    case When::kReceivedKept:
      return keeps_received(choice);
    case When::kHDropped:
      return choice.drops_h;
    case When::kHasBias:
      return choice.has_bias;
    case When::kInRing:
      return choice.has_ring;
    case When::kHasShared:
      return choice.has_shared;
    case When::kHosts:
      return choice.has_hosts;
    case When::kFp32Sums:
      return choice.fp32_sums;
  }
  return false;
}

/// How long the memory of a tensor is held.
enum class Lifetime : std::uint8_t {
  kCall,   ///< one pass; between backward_data and backward_weights, until the latter
  kSaved,  ///< from forward to the end of its backward
  kLayer   ///< as long as the layer
};

/// Who has the memory.
enum class Region : std::uint8_t {
  kCallers,    ///< the caller, on this rank
  kLocal,      ///< this rank
  kSymmetric,  ///< this rank, at the same offset on every rank: peers reach it
};

struct TensorRow {
  Tensor tensor = Tensor::kNone;
  const char* name = "";
  Element element = Element::kBf16;
  Extent shape[4] = {Extent::kOne, Extent::kOne, Extent::kOne, Extent::kOne};  ///< outermost first
  Region region = Region::kLocal;
  Lifetime lifetime = Lifetime::kCall;
  When when = When::kAlways;  ///< there is such a tensor
  /// When a saved tensor is not kept: each pass that reads it has it for the call.
  When remade = When::kNever;
  /// If that tensor is held for the call: this one lies in its memory. Each element is written by
  /// the task that alone reads the other's there, and has read it.
  Tensor over = Tensor::kNone;
};

constexpr bool is_saved(const TensorRow& tensor, GraphChoice choice) {
  return tensor.lifetime == Lifetime::kSaved && holds(tensor.when, choice) &&
         !holds(tensor.remade, choice);
}

/// Whether the tensor's shape has this extent.
constexpr bool has_extent(const TensorRow& tensor, Extent extent) {
  for (const Extent e : tensor.shape) {
    if (e == extent) return true;
  }
  return false;
}

// ---- counters ----

/// The counters through which tasks tell one another that data is ready. docs/counters.md argues
/// why they suffice. Counts only grow; a pass counts from the value that it found (its base). In
/// the order of the pass: the counters that a stage waits for stand before those of later stages.
enum class CounterKind : std::uint8_t {
  kPublished,  ///< [source rank], on every rank: the source's tokens can be pulled
  kCrossed,    ///< [source rank of another host, piece], on every rank: likewise, tokens of a piece
  kRowsReady,  ///< [row / rows_per_counter]: rows dispatched
  kXReady,     ///< [row / rows_per_counter]: rows of x made again
  kXDone,      ///< [local expert]: the same
  kHReady,     ///< [tile]: column tiles of refc1 done
  kTileDone,   ///< [tile]: column tiles of the first product done
  kExpertDone,  ///< [local expert]: tiles of dfc2 done
  kReleased,    ///< [local expert]: tasks done that read its rows last; in a ring of rows alone
  kArrived,     ///< [token block, pushing rank], on the tokens' rank: elements pushed
  kPushed,      ///< [piece, pushing rank], where a rank stands in for one of another host:
                ///< elements pushed for that one
  kReturned,    ///< [token block, host], on the tokens' rank: rows and sums that came back
};
inline constexpr int kNumCounterKinds = 12;
inline constexpr int kMaxCounterKinds = 13;

/// What one counter of a kind stands for, and so what a task adds to which of them.
enum class CounterOf : std::uint8_t {
  kSource,      ///< a rank, on every rank: 1 by it, for all its tasks
  kRowGroup,    ///< rows_per_counter rows of this rank: 1 a row
  kTile,        ///< a tile of rows of this rank: 1 a task on it
  kExpert,      ///< an expert of this rank: 1 a task on its tiles
  kExpertRows,  ///< an expert of this rank: 1 a row
  kExpertUses,  ///< an expert of this rank: 1 a task on its tiles or its weight gradients
  kTokenBlock,  ///< token_block tokens, and a pushing rank: 1 an element
  kCrossing,    ///< tokens of a rank that another host's need first in a block: 1 a token, on every
                ///< rank of that host
  kPiece,       ///< rows of a block for a rank of another host, and a pushing rank: 1 an element
  kReturn       ///< token_block tokens, and a host that is not theirs: 1 a row or sum
};

struct CounterRow {
  CounterKind kind = CounterKind::kPublished;
  const char* name = "";
  CounterOf of = CounterOf::kTile;
  When when = When::kAlways;  ///< the pass waits for such counters
};

/// Peers raise counters of what they wrote to this rank.
constexpr Region region_of(CounterOf of) {
  switch (of) {
    case CounterOf::kSource:
    case CounterOf::kTokenBlock:
    case CounterOf::kCrossing:
    case CounterOf::kPiece:
    case CounterOf::kReturn:
      return Region::kSymmetric;
    default:
      return Region::kLocal;
  }
}

/// Some kinds of counters, a bit each.
using CounterSet = std::uint16_t;
static_assert(kMaxCounterKinds <= 8 * static_cast<int>(sizeof(CounterSet)));

constexpr UNIEP_HD CounterSet bit_of(CounterKind kind) {
  return static_cast<CounterSet>(1u << static_cast<unsigned>(kind));
}

/// Calls f(kind) for each of the set, in order.
template <class F>
constexpr UNIEP_HD void for_each_counter(CounterSet set, F&& f) {
  for (int kind = 0; set >> kind != 0; ++kind) {
    if ((set >> kind & 1) != 0) f(static_cast<CounterKind>(kind));
  }
}

/// Calls f for each counter of a set that is known when code is compiled.
template <CounterSet set, int kind = 0, class F>
constexpr UNIEP_HD void for_each_counter(F&& f) {
  if constexpr (set >> kind != 0) {
    if constexpr ((set >> kind & 1) != 0) f(static_cast<CounterKind>(kind));
    for_each_counter<set, kind + 1>(f);
  }
}

// ---- stages ----

/// What a task of the stage does.
enum class StageKind : std::uint8_t {
  kMove,     ///< copies
  kProduct,  ///< a tile of a matrix product, with its epilogue
  kSum       ///< adds rows up
};

/// Whether its tasks reach other ranks.
enum class StageSide : std::uint8_t {
  kLocal,
  kPull,  ///< reads what peers have published
  kPush,  ///< writes to the ranks that rows came from
  kRail   ///< sends to the rank of the same local number on another host
};

/// What the stage's output is cut into, a task each.
enum class TileGrid : std::uint8_t {
  kNone,         ///< it has no tasks in a queue
  kPulls,        ///< runs of `pull_tokens` pulls of a block
  kRowTiles,     ///< tiles of a block's rows, by column tiles
  kWeightTiles,  ///< tiles of an expert's weight gradient
  kTokenBlocks,  ///< blocks of this rank's tokens
  kCrossings,    ///< tokens that are needed first in a block, by other host
  kReturns       ///< rows and sums that a block completes, by other host
};

/// Where the stage stands among the launches of a pass (launches.h). Of one place, stages follow
/// one another block by block in the order of the graph.
enum class StagePlace : std::uint8_t {
  kEnter,       ///< before the first launch
  kCross,       ///< in the communication queue, before everything else there
  kDispatch,    ///< in the communication queue, before kFirst block by block
  kRedispatch,  ///< there too: what kRecompute needs, or else kWeights alone
  kRecompute,   ///< what kFirst needs of the forward pass, `lag` blocks before it
  kFirst,       ///< the first product, and what goes with it
  kSecond,      ///< the second, `lag` blocks later
  kWeights,     ///< weight gradients: where the axis `wgrad` says
  kReturn,      ///< a block after kSecond
  kLast         ///< after everything
};

/// A few tensors, in an order that means something.
class TensorList {
 public:
  static constexpr int kMax = 8;

  constexpr TensorList() = default;
  constexpr TensorList(std::initializer_list<Tensor> tensors) {
    for (const Tensor t : tensors) tensors_[count_++] = t;
  }
  constexpr int size() const { return count_; }
  constexpr Tensor operator[](int i) const { return tensors_[i]; }
  constexpr const Tensor* begin() const { return tensors_; }
  constexpr const Tensor* end() const { return tensors_ + count_; }
  constexpr bool contains(Tensor tensor) const {
    for (const Tensor t : *this) {
      if (t == tensor) return true;
    }
    return false;
  }

 private:
  Tensor tensors_[kMax] = {};
  int count_ = 0;
};

/// How the stage is drawn: in pictures, and by a name of the palette that trace viewers reserve.
struct StageLook {
  const char* color = "#806e5c";
  const char* trace_color = "generic_work";
};

/// A stage of a pass.
struct StageRow {
  Pass pass = Pass::kForward;
  Stage stage = Stage::kPlan;
  const char* name = "";
  StageKind kind = StageKind::kMove;
  StageSide side = StageSide::kLocal;
  TileGrid grid = TileGrid::kNone;
  StagePlace place = StagePlace::kEnter;
  /// The width of what it computes or moves, which kRowTiles and kWeightTiles are cut along.
  Extent cols = Extent::kOne;
  /// The height of kWeightTiles.
  Extent rows = Extent::kOne;
  /// What a product sums over; kRows: the rows of the expert.
  Extent reduction = Extent::kOne;
  /// 2: a tile has `tile_n / 2` columns of each half of its weights, where these have two.
  int halves = 1;
  /// What a product reads: its left operand, its right one, then its epilogue's.
  TensorList reads{};
  TensorList writes{};
  CounterSet waits = 0;
  /// What it also waits for, in passes of several ranks of which `also_when` holds.
  CounterSet also_waits = 0;
  When also_when = When::kAlways;
  CounterSet signals = 0;
  StageLook look{};
  When when = When::kAlways;  ///< the pass has this stage
  /// If another stage does the same work: that one, by whose measured times this one is predicted.
  /// kPlan: there is none.
  Stage like = Stage::kPlan;
};

inline constexpr int kMaxStageRows = 24;

// ---- the graph ----

struct Graph {
  TensorRow tensors[kMaxTensors]{};
  int num_tensors = 0;
  CounterRow counters[kMaxCounterKinds]{};
  int num_counters = 0;
  StageRow stages[kMaxStageRows]{};
  int num_stages = 0;

  constexpr void add(const TensorRow& row) { tensors[num_tensors++] = row; }
  constexpr void add(const CounterRow& row) { counters[num_counters++] = row; }
  constexpr void add(const StageRow& row) { stages[num_stages++] = row; }

  constexpr const TensorRow& operator[](Tensor tensor) const {
    return tensors[static_cast<int>(tensor)];
  }
  constexpr const CounterRow& operator[](CounterKind kind) const {
    return counters[static_cast<int>(kind)];
  }

  /// Calls f(row) for the stages of a pass, in order.
  template <class F>
  constexpr void for_each_stage(Pass pass, F&& f) const {
    for (int i = 0; i < num_stages; ++i) {
      if (stages[i].pass == pass) f(stages[i]);
    }
  }

  /// The first row of a stage; its rows differ in what they move, not in what they are. Null: none.
  constexpr const StageRow* find(Stage stage) const {
    for (int i = 0; i < num_stages; ++i) {
      if (stages[i].stage == stage) return &stages[i];
    }
    return nullptr;
  }

  /// The stage in that pass; null: it has none.
  constexpr const StageRow* find(Pass pass, Stage stage) const {
    for (int i = 0; i < num_stages; ++i) {
      if (stages[i].pass == pass && stages[i].stage == stage) return &stages[i];
    }
    return nullptr;
  }
};

/// Whether the stage reads or writes the tensor.
constexpr bool involves(const StageRow& stage, Tensor tensor) {
  return stage.reads.contains(tensor) || stage.writes.contains(tensor);
}

/// Whether the pass has this tensor in memory that is held for the call.
constexpr bool is_of_call(const Graph& graph, Pass pass, const TensorRow& tensor,
                          GraphChoice choice) {
  if (tensor.lifetime == Lifetime::kLayer || !holds(tensor.when, choice)) return false;
  if (is_saved(tensor, choice)) return false;
  bool used = false;
  graph.for_each_stage(pass, [&](const StageRow& s) {
    if (!holds(s.when, choice)) return;
    // What is remade but not read, the stage that would write it leaves out.
    const bool remade = tensor.lifetime == Lifetime::kSaved;
    used = used || (remade ? s.reads.contains(tensor.tensor) : involves(s, tensor.tensor));
  });
  return used;
}

}  // namespace uniep
