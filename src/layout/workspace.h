#pragma once

#include <cstddef>
#include <cstdint>

#include "base/math.h"
#include "graph/extents.h"
#include "graph/layer_graph.h"
#include "uniep/problem.h"

// Every allocation of a layer. Which tensors it holds, and their sizes, follow from the graph
// (src/graph); offsets are bytes from the start of the allocation.

namespace uniep {

namespace detail {

/// Hands out consecutive, aligned byte ranges.
class Ranges {
 public:
  template <class T>
  std::int64_t take(std::int64_t count) {
    return take_bytes(count * static_cast<std::int64_t>(sizeof(T)));
  }
  std::int64_t take_bytes(std::int64_t count) {
    const std::int64_t offset = bytes_;
    bytes_ = round_up<std::int64_t>(bytes_ + count, 256);
    return offset;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::int64_t bytes_ = 0;
};

}  // namespace detail

/// Where some tensors and counters of a graph lie in one allocation: the tensors first, then the
/// counters, each in the order of the graph.
class TensorLayout {
 public:
  std::int64_t bytes = 0;
  std::int64_t first_counter = 0;  ///< from here on, counters only

  /// Offset of the tensor, which must be part of the layout; of counter 0 of a kind.
  UNIEP_HD std::int64_t operator[](Tensor tensor) const {
    return tensors_[static_cast<int>(tensor)];
  }
  UNIEP_HD std::int64_t operator[](CounterKind kind) const {
    return counters_[static_cast<int>(kind)];
  }
  bool holds(Tensor tensor) const { return (held_ >> static_cast<int>(tensor) & 1) != 0; }

 protected:
  TensorLayout() = default;

  /// Lays out the tensors of which `holds(row)`, and the counters of a region.
  template <class Holds>
  void lay_out_tensors(const Graph& graph, const Extents& extents, Holds&& holds) {
    for (int i = 0; i < graph.num_tensors; ++i) {
      const TensorRow& tensor = graph.tensors[i];
      if (!holds(tensor)) continue;
      tensors_[i] =
          tensor.over != Tensor::kNone && this->holds(tensor.over)
              ? (*this)[tensor.over]
              : ranges_.take_bytes(elements_of(tensor, extents) * bytes_of(tensor.element));
      held_ |= std::uint64_t{1} << i;
    }
    first_counter = bytes = ranges_.bytes();
  }
  void lay_out_counters(const Graph& graph, const Extents& extents, Region region) {
    for (int i = 0; i < graph.num_counters; ++i) {
      const CounterOf of = graph.counters[i].of;
      if (region_of(of) != region) continue;
      counters_[i] = ranges_.take<std::uint32_t>(counters_of(of, extents));
    }
    bytes = ranges_.bytes();
  }

 private:
  std::int64_t tensors_[kMaxTensors] = {};
  std::int64_t counters_[kMaxCounterKinds] = {};
  std::uint64_t held_ = 0;  // a bit a tensor
  detail::Ranges ranges_;
};

/// Memory that every rank allocates alike, so that peers reach it at the same offsets: what a rank
/// publishes, what peers push to it, and the counters that they raise.
struct SymmetricLayout : TensorLayout {
  SymmetricLayout(const Problem& p, int num_ranks, const Graph& graph = kLayerGraph,
                  int hosts = 1) {
    const Extents extents = extents_of(p, num_ranks, 0, hosts);
    lay_out_tensors(graph, extents, [&](const TensorRow& t) {
      return t.region == Region::kSymmetric && uniep::holds(t.when, choice_of(p, hosts));
    });
    lay_out_counters(graph, extents, Region::kSymmetric);
  }
};

/// The part of a GPU rank's symmetric memory through which ranks exchange their routing. Offsets
/// are from the start of this part; zeroed once, when it is allocated.
///
/// Every rank writes its topk_ids, its number of tokens and how full its row pool is into every
/// rank's copy, then adds to its flag there. Plan number n (from 1) uses half n % 2, and nobody
/// need say that a half was read: a rank writes for plan n only after its own plan n - 1 was
/// finished, for which it saw flags that every peer raised in plan n - 1. A peer raises them in a
/// kernel that runs after its plan n - 2 on the same stream, so what it read of half n % 2 then, it
/// has read.
struct PlanExchangeLayout {
  /// What a rank adds to its flags in one plan, whatever its grid: a part of its ids each.
  static constexpr std::uint32_t kParts = 64;

  std::int64_t ids;     // int32 [2, ranks, slots_per_rank]
  std::int64_t tokens;  // int64 [2, ranks]: by source
  std::int64_t pools;   // int64 [2, ranks, 2]: by source; pages of its row pool, and free ones
  std::int64_t flags;   // uint32 [ranks]: by source, kParts a plan
  std::int64_t bytes;
  std::int64_t slots_per_rank;  // a multiple of 4, so that 16-byte stores may pass the last id

  PlanExchangeLayout(const Problem& p, int num_ranks)
      : slots_per_rank(round_up<std::int64_t>(p.max_tokens * p.topk, 4)) {
    detail::Ranges r;
    ids = r.take<std::int32_t>(2 * num_ranks * slots_per_rank);
    tokens = r.take<std::int64_t>(2 * num_ranks);
    pools = r.take<std::int64_t>(2 * num_ranks * 2);
    flags = r.take<std::uint32_t>(num_ranks);
    bytes = r.bytes();
  }
};

/// Counters that only this rank's tasks use. Like the symmetric ones they live as long as the
/// layer.
struct LocalCounterLayout : TensorLayout {
  LocalCounterLayout(const Problem& p, int num_ranks, const Graph& graph = kLayerGraph) {
    lay_out_counters(graph, extents_of(p, num_ranks, capacity_rows(p, num_ranks)), Region::kLocal);
  }
};

/// What forward keeps for backward: of `rows` rows, the plan's padded_rows, and `received` tokens.
struct SavedLayout : TensorLayout {
  SavedLayout(const Problem& p, std::int64_t rows, std::int64_t received,
              const Graph& graph = kLayerGraph) {
    Extents extents = extents_of(p, 1, rows);
    extents[Extent::kReceived] = received;
    lay_out_tensors(graph, extents, [&](const TensorRow& t) { return is_saved(t, choice_of(p)); });
  }
};

/// How many of `rows` rows a pass has room for at a time.
inline std::int64_t rows_at_a_time(const Problem& p, std::int64_t rows, Pass pass) {
  return pass == Pass::kBackward && p.backward_rows > 0 ? min_of(rows, p.backward_rows) : rows;
}

/// Rows that live for one pass of that direction: of a call, or not kept though others save them.
struct RowLayout : TensorLayout {
  RowLayout(const Problem& p, std::int64_t rows, Pass pass, const Graph& graph = kLayerGraph) {
    const std::int64_t held = rows_at_a_time(p, rows, pass);
    lay_out_tensors(graph, extents_of(p, 1, held), [&](const TensorRow& t) {
      return t.region == Region::kLocal && is_of_call(graph, pass, t, choice_of(p));
    });
  }
};

/// Multiples at which a caller's memory begins: a cache line on the CPU, the offsets of all layouts
/// on a GPU.
inline constexpr std::int64_t kCpuAlignment = 64;
inline constexpr std::int64_t kDeviceAlignment = 256;

struct CpuPlanHeader {
  std::uint64_t magic = 0;
  std::uint64_t checksum = 0;     // of the bytes from here on
  std::uint64_t fingerprint = 0;  // of the routing
  Problem problem;
  std::int32_t rank = -1;
  std::int32_t num_ranks = 0;
};

/// A plan of the CPU backend in the caller's memory.
struct CpuPlanLayout {
  std::int64_t header;           // CpuPlanHeader [1]
  std::int64_t tokens_per_rank;  // int64 [ranks]
  std::int64_t topk_ids;         // int32 [tokens of all ranks, K], rank after rank
  std::int64_t bytes;

  CpuPlanLayout(const Problem& p, int num_ranks) {
    detail::Ranges r;
    header = r.take<CpuPlanHeader>(1);
    tokens_per_rank = r.take<std::int64_t>(num_ranks);
    topk_ids = r.take<std::int32_t>(num_ranks * p.max_tokens * p.topk);
    bytes = r.bytes();
  }
};

}  // namespace uniep
