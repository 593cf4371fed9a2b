#pragma once

#include <cstddef>
#include <cstdint>

#include "base/contract.h"
#include "base/math.h"
#include "uniep/bf16.h"
#include "uniep/problem.h"
#include "uniep/stage.h"

// Every buffer of a layer, stated once. Offsets are bytes from the start of the allocation; both
// sizes and addresses derive from these structs.

namespace uniep {

namespace detail {

/// Hands out consecutive, aligned byte ranges.
class Ranges {
 public:
  template <class T>
  std::int64_t take(std::int64_t count) {
    const std::int64_t offset = bytes_;
    bytes_ = round_up<std::int64_t>(bytes_ + count * static_cast<std::int64_t>(sizeof(T)), 256);
    return offset;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::int64_t bytes_ = 0;
};

}  // namespace detail

/// Smallest values of the axes that sizes depend on: with these the counters are most numerous.
inline constexpr std::int64_t kMinTileM = 16;
inline constexpr std::int64_t kMinTokenBlock = 1;

/// Memory that every rank allocates alike, so that peers reach it at the same offsets.
struct SymmetricLayout {
  std::int64_t tokens;     // bf16 [max_tokens, H]: x or dy, pulled by peers
  std::int64_t probs;      // fp32 [max_tokens, K]: topk_probs, pulled by peers
  std::int64_t combine;    // bf16 [max_tokens, K, H]: rows of y or dx, pushed by peers
  std::int64_t dprobs;     // fp32 [max_tokens, K], pushed by peers
  std::int64_t published;  // uint32 [ranks]; from here on, counters only
  std::int64_t arrived;    // uint32 [token blocks, ranks]
  std::int64_t bytes;

  SymmetricLayout(const Problem& p, int num_ranks) {
    detail::Ranges r;
    tokens = r.take<bf16>(p.max_tokens * p.hidden);
    probs = r.take<float>(p.max_tokens * p.topk);
    combine = r.take<bf16>(p.max_tokens * p.topk * p.hidden);
    dprobs = r.take<float>(p.max_tokens * p.topk);
    published = r.take<std::uint32_t>(num_ranks);
    arrived = r.take<std::uint32_t>(num_token_blocks(p) * num_ranks);
    bytes = r.bytes();
  }

  static std::int64_t num_token_blocks(const Problem& p) {
    return ceil_div(p.max_tokens, kMinTokenBlock);
  }
};

/// The part of a GPU rank's symmetric memory through which ranks exchange their routing. Offsets
/// are from the start of this part; zeroed once, when it is allocated.
///
/// Every rank writes its topk_ids and its number of tokens into every rank's copy, then adds to its
/// flag there. Plan number n (from 1) uses half n % 2, and nobody need say that a half was read: a
/// rank writes for plan n only after its own plan n - 1 was finished, for which it saw flags that
/// every peer raised in plan n - 1. A peer raises them in a kernel that runs after its plan n - 2
/// on the same stream, so what it read of half n % 2 then, it has read.
struct PlanExchangeLayout {
  /// What a rank adds to its flags in one plan, whatever its grid: a part of its ids each.
  static constexpr std::uint32_t kParts = 64;

  std::int64_t ids;     // int32 [2, ranks, slots_per_rank]
  std::int64_t tokens;  // int64 [2, ranks]: by source
  std::int64_t flags;   // uint32 [ranks]: by source, kParts a plan
  std::int64_t bytes;
  std::int64_t slots_per_rank;  // a multiple of 4, so that 16-byte stores may pass the last id

  PlanExchangeLayout(const Problem& p, int num_ranks)
      : slots_per_rank(round_up<std::int64_t>(p.max_tokens * p.topk, 4)) {
    detail::Ranges r;
    ids = r.take<std::int32_t>(2 * num_ranks * slots_per_rank);
    tokens = r.take<std::int64_t>(2 * num_ranks);
    flags = r.take<std::uint32_t>(num_ranks);
    bytes = r.bytes();
  }
};

/// Counters that only this rank's tasks use. Like the symmetric ones they live as long as the
/// layer.
struct LocalCounterLayout {
  std::int64_t rows_ready;   // uint32 [capacity / kMinTileM]
  std::int64_t tile_done;    // uint32 [capacity / kMinTileM]
  std::int64_t expert_done;  // uint32 [local experts]
  std::int64_t bytes;

  LocalCounterLayout(const Problem& p, int num_ranks) {
    detail::Ranges r;
    const std::int64_t tiles = ceil_div(capacity_rows(p, num_ranks), kMinTileM);
    rows_ready = r.take<std::uint32_t>(tiles);
    tile_done = r.take<std::uint32_t>(tiles);
    expert_done = r.take<std::uint32_t>(p.num_experts / num_ranks);
    bytes = r.bytes();
  }
};

/// What forward keeps for backward; `rows` is the plan's padded_rows.
struct SavedLayout {
  std::int64_t x_rows;     // bf16 [rows, H]
  std::int64_t h;          // bf16 [rows, 2I]: gate half, up half
  std::int64_t row_probs;  // fp32 [rows]
  std::int64_t bytes;

  SavedLayout(const Problem& p, std::int64_t rows) {
    detail::Ranges r;
    x_rows = r.take<bf16>(rows * p.hidden);
    h = r.take<bf16>(rows * 2 * p.intermediate);
    row_probs = r.take<float>(rows);
    bytes = r.bytes();
  }
};

/// Rows that live for one pass. `a` is written by forward (fc1) and again by backward (dfc2); the
/// rest is backward's.
struct RowLayout {
  std::int64_t a;             // bf16 [rows, I]
  std::int64_t dy_rows;       // bf16 [rows, H]
  std::int64_t dh;            // bf16 [rows, 2I]: gate half, up half
  std::int64_t dprob_groups;  // fp32 [rows, dprob_groups_per_row]
  std::int64_t bytes;

  RowLayout(const Problem& p, std::int64_t rows, Pass pass) {
    const std::int64_t backward_rows = pass == Pass::kBackward ? rows : 0;
    detail::Ranges r;
    a = r.take<bf16>(rows * p.intermediate);
    dy_rows = r.take<bf16>(backward_rows * p.hidden);
    dh = r.take<bf16>(backward_rows * 2 * p.intermediate);
    dprob_groups = r.take<float>(backward_rows * uniep::dprob_groups(p.intermediate));
    bytes = r.bytes();
  }
};

/// Multiples at which a caller's memory begins: a cache line on the CPU, the offsets of all layouts
/// on a GPU.
inline constexpr std::int64_t kHostAlignment = 64;
inline constexpr std::int64_t kDeviceAlignment = 256;

/// What a layer of the CPU backend has for itself, where the caller brings it.
struct HostWorkspaceLayout {
  std::int64_t counters;  // LocalCounterLayout
  std::int64_t rows;      // RowLayout of the capacity: one pass at a time
  std::int64_t bytes;

  HostWorkspaceLayout(const Problem& p, int num_ranks) {
    detail::Ranges r;
    counters = r.take<std::byte>(LocalCounterLayout(p, num_ranks).bytes);
    rows = r.take<std::byte>(RowLayout(p, capacity_rows(p, num_ranks), Pass::kBackward).bytes);
    bytes = r.bytes();
  }
};

struct HostPlanHeader {
  std::uint64_t magic = 0;
  std::uint64_t fingerprint = 0;  // of the routing
  Problem problem;
  std::int32_t rank = -1;
  std::int32_t num_ranks = 0;
};

/// A plan of the CPU backend in the caller's memory.
struct HostPlanLayout {
  std::int64_t header;           // HostPlanHeader [1]
  std::int64_t tokens_per_rank;  // int64 [ranks]
  std::int64_t topk_ids;         // int32 [tokens of all ranks, K], rank after rank
  std::int64_t bytes;

  HostPlanLayout(const Problem& p, int num_ranks) {
    detail::Ranges r;
    header = r.take<HostPlanHeader>(1);
    tokens_per_rank = r.take<std::int64_t>(num_ranks);
    topk_ids = r.take<std::int32_t>(num_ranks * p.max_tokens * p.topk);
    bytes = r.bytes();
  }
};

}  // namespace uniep
