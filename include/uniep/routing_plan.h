#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "uniep/macros.h"
#include "uniep/problem.h"

namespace uniep {

struct PlanData;

/// Where a row came from. Pad rows have source -1.
struct RowOrigin {
  std::int32_t source = -1;  ///< rank that holds the token
  std::int32_t token = -1;   ///< index of the token on that rank
  std::int32_t slot = -1;    ///< k, the token's top-k slot; K + s: for shared expert s
  friend bool operator==(const RowOrigin&, const RowOrigin&) = default;
};

/// Up to `tile_m` consecutive rows of one local expert.
struct Tile {
  std::int64_t first_row = 0;
  std::int32_t rows = 0;    ///< real rows, 1 to tile_m; the pad rows behind them are not counted
  std::int32_t expert = 0;  ///< local expert
  friend bool operator==(const Tile&, const Tile&) = default;
};

/// One token copy that a rank fetches: from (source, token) to each of its local rows.
struct Pull {
  std::int32_t source = 0;
  std::int32_t token = 0;
  std::int32_t first_row = 0;  ///< index of its first row number in `pull_rows()`
  std::int32_t num_rows = 0;
};

/// What a pass moves over the wire, in token copies of H elements each.
struct Traffic {
  std::int64_t rows = 0;          ///< rows that local experts receive
  std::int64_t remote_rows = 0;   ///< of these, rows whose source is another rank
  std::int64_t remote_pulls = 0;  ///< copies pulled from other ranks: each (source, token) once
};

/// The routing of one batch as one rank sees it: the address of every row, derived from the
/// all-gathered topk_ids alone. Rows of a local expert are in canonical order (source rank, token,
/// k; see also Problem::gathered_hosts); each expert's segment starts at a multiple of
/// Problem::row_align.
///
/// An immutable handle, cheap to copy; `Layer::plan` makes it, forward and backward take it. A plan
/// of the CUDA backend lies on the device, and passes use it there; accessors that depend on the
/// routing wait for the device and copy it, once. (They refuse a plan of a CUDA graph capture.)
class UNIEP_API RoutingPlan {
 public:
  RoutingPlan(const RoutingPlan&) = default;  // and so for moving: a handle is never empty
  RoutingPlan& operator=(const RoutingPlan&) = default;

  /// The plan of `rank`, without communication. `tokens_per_rank` has one entry a rank (0 to
  /// max_tokens); `topk_ids` is [sum of tokens_per_rank, K], rank after rank, -1 for a dropped
  /// slot. Throws Error(kInvalidArgument) for an id out of range (naming rank, token and slot) and
  /// Error(kCapacity) when any rank (not just this one) would receive more rows than
  /// `capacity_rows`, naming that rank and the capacity that would do.
  static RoutingPlan build(const Problem& problem, int rank,
                           std::span<const std::int64_t> tokens_per_rank,
                           std::span<const std::int32_t> topk_ids);

  const Problem& problem() const;
  int rank() const;
  int num_ranks() const;
  std::int64_t tokens() const;  ///< tokens of this rank
  std::span<const std::int64_t> tokens_per_rank() const;
  std::span<const std::int32_t> topk_ids() const;  ///< of this rank, [tokens, K]

  /// E / ranks, and behind these the shared experts, of which each has all tokens of this rank.
  int num_local_experts() const;
  int first_expert() const;                                 ///< global number of local expert 0
  std::span<const std::int64_t> tokens_per_expert() const;  ///< rows of each local expert
  std::span<const std::int64_t> segment_begin() const;      ///< [local experts + 1], aligned
  std::int64_t padded_rows() const;                         ///< segment_begin().back()
  std::int64_t received_tokens() const;  ///< tokens with rows here, each once: pulls().size()
  std::span<const RowOrigin> row_origin() const;  ///< [padded_rows]

  std::span<const Pull> pulls() const;              ///< in canonical order
  std::span<const std::int64_t> pull_rows() const;  ///< row numbers, ascending within a pull

  /// Tiles of `tile_m` rows by local expert, then by row. `tile_m` divides row_align.
  std::vector<Tile> tiles(int tile_m) const;

  Traffic traffic() const;

  /// Library-internal.
  explicit RoutingPlan(std::shared_ptr<const PlanData> data) : data_(std::move(data)) {}
  const PlanData& data() const { return *data_; }

 private:
  std::shared_ptr<const PlanData> data_;
};

}  // namespace uniep
