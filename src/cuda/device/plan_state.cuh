#pragma once

#include "cuda/device/warp.cuh"
#include "cuda/plan_kernels.h"

// What the steps of the plan's kernel share: where the exchanged routing lies, the walk through it,
// and the counts that one step leaves to the next.

namespace uniep::cuda {

inline constexpr int kPlanWarps = 16;
inline constexpr int kPlanThreads = 32 * kPlanWarps;

/// Dynamic shared memory of a plan kernel.
__host__ __device__ inline std::size_t plan_shared_bytes(int local_experts, int num_ranks) {
  const int totals = num_ranks * local_experts + num_ranks;
  return sizeof(std::uint32_t) * static_cast<std::size_t>(kPlanWarps * local_experts + totals +
                                                          (local_experts + 2) + local_experts);
}

/// What the threads of a CTA share.
struct PlanCta {
  std::uint32_t epoch;                    // number of this plan, from 1
  bool failed;                            // a wait expired, here or in an earlier launch
  int tokens_fault;                       // first rank with an impossible number of tokens, or -1
  int token_begin[kMaxCudaRanks + 1];     // of each rank's tokens in the concatenated routing
  std::int64_t tokens[kMaxCudaRanks];     // as the ranks said
  std::int64_t rank_rows[kMaxCudaRanks];  // pad rows included
  unsigned long long fullest[kMaxCudaRanks];  // rows of its fullest expert, then ~(its number)
  PageCount pools[kMaxCudaRanks];             // as the ranks said
  int warp_rows[kPlanWarps];
  int warp_pulls[kPlanWarps];
};

/// What a thread of the plan's kernel knows.
class PlanState {
 public:
  __device__ PlanState(const PlanArgs& args, PlanCta& cta, std::uint32_t* shared)
      : a_(args),
        cta_(cta),
        slots_(args.topk + args.experts.shared),
        local_(args.experts.of_rank()),
        first_expert_(args.rank * local_),
        warp_rows_of_(shared),
        slots_of_(warp_rows_of_ + kPlanWarps * local_),
        before_cta_(slots_of_ + num_totals()),
        segment_(before_cta_ + local_ + 2) {}

 protected:
  template <class T>
  __device__ T* at_rank(int rank, std::int64_t offset) const {
    return reinterpret_cast<T*>(a_.exchange.parts[rank] + offset);
  }
  __device__ int half() const { return static_cast<int>(cta_.epoch % 2); }
  __device__ std::int64_t ids_offset(int source) const {
    const PlanExchangeLayout& l = a_.exchange.layout;
    const std::int64_t index = (half() * a_.num_ranks + source) * l.slots_per_rank;
    return l.ids + index * static_cast<std::int64_t>(sizeof(std::int32_t));
  }
  __device__ std::int64_t tokens_offset(int source) const {
    const std::int64_t index = half() * a_.num_ranks + source;
    return a_.exchange.layout.tokens + index * static_cast<std::int64_t>(sizeof(std::int64_t));
  }
  __device__ std::int64_t pool_offset(int source) const {
    const std::int64_t index = half() * a_.num_ranks + source;
    return a_.exchange.layout.pools + index * static_cast<std::int64_t>(sizeof(PageCount));
  }

  /// One slot of the routing in each lane, as many whole tokens at a time as fit: no token is cut.
  /// A token's slots are those of its K experts, then of the shared ones of its rank.
  struct Slot {
    bool present;  // the lane has a slot
    int token;     // in canonical order, see find_token
    int source;
    int own_token;        // of the source
    std::int32_t expert;  // as ExpertNumbers has it; or one of these:
  };
  static constexpr std::int32_t kDropped = -1, kImpossible = -2;

  /// Tokens in canonical order: those that ranks have, one after another. Of gathered hosts, places
  /// for as many as ranks may have, as TokenOrder numbers them.
  __device__ int num_tokens() const {
    if (a_.order.hosts == 1) return cta_.token_begin[a_.num_ranks];
    return static_cast<int>(a_.order.most_tokens) * a_.num_ranks;
  }
  /// The number that such a token has on its source. The source, if there is one host, is looked
  /// for from `source` on, so it must not be that of a later token.
  __device__ int find_token(int token, int& source) const {
    if (a_.order.hosts == 1) {
      while (token >= cta_.token_begin[source + 1]) ++source;
      return token - cta_.token_begin[source];
    }
    const TokenOrder::Token found = a_.order.token(token);
    source = found.source;
    return static_cast<int>(found.token);
  }
  /// Whether its source has it.
  __device__ bool has_token(int source, int own_token) const {
    return own_token < cta_.token_begin[source + 1] - cta_.token_begin[source];
  }

  __device__ int tokens_a_step() const { return 32 / slots_; }
  __device__ int slot_of_lane() const { return lane_index() % slots_; }

  __device__ std::int32_t expert_of_id(std::int32_t id) const {
    const bool possible = id >= 0 && id < a_.experts.routed * a_.num_ranks;
    return possible ? a_.experts.of_id(id) : id == -1 ? kDropped : kImpossible;
  }

  /// Calls f(Slot) for every step of this warp's tokens, with all lanes. Ids of several steps are
  /// loaded together, since each load takes longer than the work on it.
  template <class F>
  __device__ void for_each_step(F&& f) const {
    constexpr int kAhead = 4;
    const int step = tokens_a_step();
    const int total = num_tokens();
    const int warps = static_cast<int>(gridDim.x) * kPlanWarps;
    const int warp = static_cast<int>(blockIdx.x) * kPlanWarps + warp_index();
    const std::int64_t run = round_up(ceil_div(total, warps), step);
    const int begin = static_cast<int>(min_of<std::int64_t>(run * warp, total));
    const int end = static_cast<int>(min_of<std::int64_t>(run * (warp + 1), total));
    const int lane_token = lane_index() / slots_;
    const int k = slot_of_lane();
    int source = 0;
    for (int first = begin; first < end; first += kAhead * step) {
      Slot slots[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int token = first + i * step + lane_token;
        bool present = lane_token < step && token < end;
        int own_token = 0;
        if (present) {
          own_token = find_token(token, source);
          present = has_token(source, own_token);
        }
        std::int32_t expert = kDropped;
        if (present && k >= a_.topk) {
          expert = a_.experts.of_shared(source, k - a_.topk);
        } else if (present) {
          const std::int64_t index = static_cast<std::int64_t>(own_token) * a_.topk + k;
          // Written by other GPUs: from L2, past this SM's read-only and L1 caches.
          expert = expert_of_id(
              __ldcg(at_rank<const std::int32_t>(a_.rank, ids_offset(source)) + index));
        }
        slots[i] = {present, token, source, own_token, expert};
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i * step < end) f(slots[i]);
      }
    }
  }

  __device__ bool is_local(std::int32_t expert) const {
    return expert >= first_expert_ && expert < first_expert_ + local_;
  }
  __device__ int first_lane_of_token() const { return lane_index() / slots_ * slots_; }
  /// Lanes that hold slots of this lane's token.
  __device__ unsigned token_lanes() const { return lanes_below(slots_) << first_lane_of_token(); }
  __device__ bool leads_token() const { return slot_of_lane() == 0; }

  /// Columns of cta_counts: the rows of each local expert, then pulls, then rows of all.
  __device__ int columns() const { return local_ + 2; }

  /// What all CTAs have counted of all ranks: rows of each expert, then tokens of each rank.
  __device__ int num_experts() const { return a_.num_ranks * local_; }
  __device__ int num_totals() const { return num_experts() + a_.num_ranks; }
  __device__ std::uint32_t* totals(int half) const {
    return a_.scratch.totals + half * num_totals();
  }
  __device__ std::uint32_t total(int expert) const { return __ldcg(totals(half()) + expert); }
  /// Tokens that a rank receives, each once. Counted where pages are to hold them.
  __device__ std::uint32_t received(int rank) const { return total(num_experts() + rank); }

  const PlanArgs& a_;
  PlanCta& cta_;
  const int slots_;  // of a token
  const int local_;  // experts of a rank, shared ones too
  const int first_expert_;
  std::uint32_t* const warp_rows_of_;  // [warps, local experts]
  std::uint32_t* const slots_of_;      // [num_totals()]: as totals
  std::uint32_t* const before_cta_;    // [local experts + 2]: see columns()
  std::uint32_t* const segment_;       // [local experts]: segment_begin
};

}  // namespace uniep::cuda
