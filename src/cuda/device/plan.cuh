#pragma once

#include "cuda/device/grid_barrier.cuh"
#include "cuda/device/refusal.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/plan_launch.h"

// The routing plan of one rank, by all CTAs of one launch.
//
//   push     this rank's ids and number of tokens to every rank; wait for everybody's
//   count    every warp takes a run of tokens of the concatenated routing, in canonical order, and
//            counts its rows of every local expert
//   barrier  of the grid
//   place    rows before a warp = those of the segments before, of earlier CTAs, of earlier warps;
//            it walks its tokens again and gives out addresses in order
//
// Nothing is sorted, and no atomic operation decides an address: atomics only add up numbers.

namespace uniep::cuda {

inline constexpr int kPlanWarps = 16;
inline constexpr int kPlanThreads = 32 * kPlanWarps;

/// Dynamic shared memory of a plan kernel.
__host__ __device__ inline std::size_t plan_shared_bytes(int num_experts, int num_ranks) {
  const int local = num_experts / num_ranks;
  return sizeof(std::uint32_t) *
         static_cast<std::size_t>(kPlanWarps * local + num_experts + (local + 2) + local);
}

/// What the threads of a CTA share.
struct PlanCta {
  std::uint32_t epoch;                // number of this plan, from 1
  bool failed;                        // a wait expired, here or in an earlier launch
  int tokens_fault;                   // first rank with an impossible number of tokens, or -1
  int token_begin[kMaxRanks + 1];     // of each rank's tokens in the concatenated routing
  std::int64_t tokens[kMaxRanks];     // as the ranks said
  std::int64_t rank_rows[kMaxRanks];  // pad rows included
  int warp_rows[kPlanWarps];
  int warp_pulls[kPlanWarps];
};

class PlanRoutine {
 public:
  __device__ PlanRoutine(const PlanArgs& args, PlanCta& cta, std::uint32_t* shared)
      : a_(args),
        cta_(cta),
        local_(args.num_experts / args.num_ranks),
        first_expert_(args.rank * local_),
        warp_rows_of_(shared),
        slots_of_(warp_rows_of_ + kPlanWarps * local_),
        before_cta_(slots_of_ + args.num_experts),
        segment_(before_cta_ + local_ + 2) {}

  __device__ void run() {
    begin();
    if (!cta_.failed) {
      push();
      if (wait_for_peers()) {
        read_tokens();
        count();
        publish_counts();
        if (wait_for_grid()) {
          finish();
          return;
        }
      }
    }
    make_empty({.fault = {}, .expired = 1});
  }

 private:
  // ---- exchange ----

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

  __device__ void begin() {
    if (threadIdx.x == 0) {
      if (blockIdx.x == 0) begin_call(a_.calls);
      cta_.epoch = ptx::load_relaxed_gpu(a_.scratch.epoch) + 1;
      cta_.failed = ptx::load_relaxed_gpu(a_.scratch.failed) != 0;
    }
    const int zeros = kPlanWarps * local_ + a_.num_experts + local_ + 2;  // arrays lie in a row
    for (int i = threadIdx.x; i < zeros; i += kPlanThreads) warp_rows_of_[i] = 0;
    __syncthreads();
    clear_other_half();
  }

  /// What plans take in turns was last used by the plan before, and the next one finds it zero.
  __device__ void clear_other_half() const {
    if (blockIdx.x != 0) return;
    const int other = 1 - half();
    for (int e = threadIdx.x; e < a_.num_experts; e += kPlanThreads) {
      a_.scratch.totals[other * a_.num_experts + e] = 0;
    }
    if (threadIdx.x == 0) {
      a_.scratch.plan_arrivals[other] = 0;
      a_.scratch.first_bad[other] = 0;
    }
  }

  /// Four ids from slot 4 * unit on, whatever the alignment of the caller's tensor.
  __device__ int4 load_ids(std::int64_t unit, std::int64_t slots) const {
    const std::int32_t* p = a_.topk_ids + 4 * unit;
    if (reinterpret_cast<std::uintptr_t>(p) % 16 == 0 && 4 * unit + 4 <= slots) {
      return *reinterpret_cast<const int4*>(p);
    }
    const std::int64_t left = slots - 4 * unit;
    return {p[0], left > 1 ? p[1] : -1, left > 2 ? p[2] : -1, left > 3 ? p[3] : -1};
  }

  __device__ void push_units(std::int64_t begin, std::int64_t end, std::int64_t slots) const {
    for (std::int64_t unit = begin + threadIdx.x; unit < end; unit += kPlanThreads) {
      const int4 ids = load_ids(unit, slots);
      reinterpret_cast<int4*>(a_.plan.topk_ids)[unit] = ids;
      for (int i = 0; i < a_.num_ranks; ++i) {
        const int peer = (a_.rank + i) % a_.num_ranks;  // ranks begin with different peers
        at_rank<int4>(peer, ids_offset(a_.rank))[unit] = ids;
      }
    }
  }

  __device__ void push() const {
    constexpr int kParts = PlanExchangeLayout::kParts;
    // Every rank refuses an impossible number of tokens, but none may write past the buffers.
    const bool possible = a_.tokens >= 0 && a_.tokens <= a_.max_tokens;
    const std::int64_t slots = possible ? a_.tokens * a_.topk : 0;
    const std::int64_t units = ceil_div<std::int64_t>(slots, 4);
    const int peer = static_cast<int>(threadIdx.x);
    std::uint32_t parts = 0;
    for (int part = blockIdx.x; part < kParts; part += gridDim.x, ++parts) {
      push_units(units * part / kParts, units * (part + 1) / kParts, slots);
      if (part == 0 && peer < a_.num_ranks) {
        *at_rank<std::int64_t>(peer, tokens_offset(a_.rank)) = a_.tokens;
      }
    }
    __syncthreads();
    if (parts > 0 && peer < a_.num_ranks) {
      std::uint32_t* flags = at_rank<std::uint32_t>(peer, a_.exchange.layout.flags);
      ptx::add_release_system(flags + a_.rank, parts);
    }
  }

  // ---- waits ----

  /// Ends the group's plans; the first to come describes why.
  __device__ void fail(int peer, std::uint32_t expected, std::uint32_t seen, bool refused) const {
    if (atomicExch(a_.scratch.failed, 1u) != 0) return;
    WaitFailure& w = a_.report->wait;
    w.refused = refused ? 1 : 0;
    w.stage = static_cast<int>(Stage::kPlan);
    w.peer = peer;
    w.counter = -1;
    w.tile = -1;
    w.expected = expected;
    w.seen = seen;
    __threadfence_system();
    *static_cast<volatile int*>(&w.raised) = 1;
  }

  /// Polls until `load()` is `expected` past `base` (modulo 2^32); false where the limit passes or
  /// another thread gave up, or a rank refused the call.
  template <class Load>
  __device__ bool poll(Load load, std::uint32_t base, std::uint32_t expected, int peer,
                       std::uint64_t limit_ns) const {
    std::uint32_t seen = 0;
    bool refused = false;
    const auto reached = [&] {
      seen = load() - base;
      return static_cast<std::int32_t>(seen - expected) >= 0;
    };
    if (reached()) return true;
    const std::uint64_t start = ptx::global_nanoseconds();
    do {
      for (int i = 0; i < 32; ++i) {
        if (reached()) return true;
      }
      if (ptx::load_relaxed_gpu(a_.scratch.failed) != 0) return false;
      refused = is_refused(a_.calls);
    } while (!refused && ptx::global_nanoseconds() - start <= limit_ns);
    fail(peer, expected, seen, refused);
    return false;
  }

  __device__ bool wait_for_peers() const {
    bool ok = true;
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < a_.num_ranks) {
      const std::uint32_t* flag = at_rank<std::uint32_t>(a_.rank, a_.exchange.layout.flags) + peer;
      constexpr std::uint32_t kParts = PlanExchangeLayout::kParts;
      ok = poll([&] { return ptx::load_acquire_system(flag); }, (cta_.epoch - 1) * kParts, kParts,
                peer, a_.limit_ns);
    }
    return __syncthreads_and(ok);
  }

  /// CTAs wait for one another longer than for peers, so that the peer that is missing is named.
  __device__ bool wait_for_grid() const {
    std::uint32_t* arrivals = a_.scratch.plan_arrivals + half();
    grid_arrive(arrivals);
    bool ok = true;
    if (threadIdx.x == 0) {
      ok = poll([&] { return ptx::load_acquire_gpu(arrivals); }, 0, gridDim.x, -1, 2 * a_.limit_ns);
    }
    return __syncthreads_and(ok);
  }

  // ---- count ----

  __device__ void read_tokens() const {
    if (threadIdx.x < a_.num_ranks) {
      const int r = static_cast<int>(threadIdx.x);
      cta_.tokens[r] = __ldcg(at_rank<const std::int64_t>(a_.rank, tokens_offset(r)));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      cta_.tokens_fault = -1;
      cta_.token_begin[0] = 0;
      for (int r = 0; r < a_.num_ranks; ++r) {
        const std::int64_t t = cta_.tokens[r];
        const bool possible = t >= 0 && t <= a_.max_tokens;
        if (!possible && cta_.tokens_fault < 0) cta_.tokens_fault = r;
        cta_.token_begin[r + 1] = cta_.token_begin[r] + (possible ? static_cast<int>(t) : 0);
      }
    }
    __syncthreads();
  }

  /// One slot of the routing in each lane, 32 / K whole tokens at a time: no token is cut.
  struct Slot {
    bool present;  // the lane has a slot
    int token;     // in the concatenated routing
    int source;
    std::int32_t id;
  };

  __device__ int tokens_a_step() const { return 32 / a_.topk; }

  /// Calls f(Slot) for every step of this warp's tokens, with all lanes. Ids of several steps are
  /// loaded together, since each load takes longer than the work on it.
  template <class F>
  __device__ void for_each_step(F&& f) const {
    constexpr int kAhead = 4;
    const int step = tokens_a_step();
    const int total = cta_.token_begin[a_.num_ranks];
    const int warps = static_cast<int>(gridDim.x) * kPlanWarps;
    const int warp = static_cast<int>(blockIdx.x) * kPlanWarps + warp_index();
    const std::int64_t run = round_up(ceil_div(total, warps), step);
    const int begin = static_cast<int>(min_of<std::int64_t>(run * warp, total));
    const int end = static_cast<int>(min_of<std::int64_t>(run * (warp + 1), total));
    const int lane_token = lane_index() / a_.topk;
    const int k = lane_index() % a_.topk;
    int source = 0;
    for (int first = begin; first < end; first += kAhead * step) {
      Slot slots[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int token = first + i * step + lane_token;
        const bool present = lane_token < step && token < end;
        while (present && token >= cta_.token_begin[source + 1]) ++source;
        std::int32_t id = -1;
        if (present) {
          const std::int64_t index =
              static_cast<std::int64_t>(token - cta_.token_begin[source]) * a_.topk + k;
          // Written by other GPUs: from L2, past this SM's read-only and L1 caches.
          id = __ldcg(at_rank<const std::int32_t>(a_.rank, ids_offset(source)) + index);
        }
        slots[i] = {present, token, source, id};
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i * step < end) f(slots[i]);
      }
    }
  }

  __device__ bool is_expert(std::int32_t id) const { return id >= 0 && id < a_.num_experts; }
  __device__ bool is_local(std::int32_t id) const {
    return id >= first_expert_ && id < first_expert_ + local_;
  }
  /// Lanes that hold slots of this lane's token.
  __device__ unsigned token_lanes() const {
    const int first = lane_index() / a_.topk * a_.topk;
    return lanes_below(a_.topk) << first;
  }
  __device__ bool leads_token() const { return lane_index() % a_.topk == 0; }

  __device__ void count() const {
    std::uint32_t* my_rows = warp_rows_of_ + warp_index() * local_;
    int rows = 0;
    int pulls = 0;
    unsigned long long bad = 0;  // ~(slot index) of the first impossible id
    for_each_step([&](const Slot& s) {
      if (is_expert(s.id)) {
        atomicAdd(slots_of_ + s.id, 1u);
        if (is_local(s.id)) atomicAdd(my_rows + s.id - first_expert_, 1u);
      } else if (s.id != -1 && bad == 0) {
        const int k = lane_index() % a_.topk;
        bad = ~(static_cast<unsigned long long>(s.token) * a_.topk + k);
      }
      const unsigned local = __ballot_sync(kWholeWarp, is_local(s.id));
      rows += __popc(local);
      pulls += __popc(
          __ballot_sync(kWholeWarp, leads_token() && s.present && (local & token_lanes()) != 0));
    });
    if (bad != 0) atomicMax(a_.scratch.first_bad + half(), bad);
    if (lane_index() == 0) {
      cta_.warp_rows[warp_index()] = rows;
      cta_.warp_pulls[warp_index()] = pulls;
    }
    __syncthreads();
  }

  /// Columns of cta_counts: the rows of each local expert, then pulls, then rows of all.
  __device__ int columns() const { return local_ + 2; }

  /// This CTA's counts for everybody; for itself, each warp's count becomes the count before it.
  __device__ void publish_counts() const {
    std::uint32_t* mine = a_.scratch.cta_counts + blockIdx.x * columns();
    for (int e = threadIdx.x; e < local_; e += kPlanThreads) {
      std::uint32_t before = 0;
      for (int w = 0; w < kPlanWarps; ++w) {
        const std::uint32_t rows = warp_rows_of_[w * local_ + e];
        warp_rows_of_[w * local_ + e] = before;
        before += rows;
      }
      mine[e] = before;
    }
    if (threadIdx.x < 2) {
      int* counts = threadIdx.x == 0 ? cta_.warp_pulls : cta_.warp_rows;
      int before = 0;
      for (int w = 0; w < kPlanWarps; ++w) {
        const int n = counts[w];
        counts[w] = before;
        before += n;
      }
      mine[local_ + threadIdx.x] = static_cast<std::uint32_t>(before);
    }
    std::uint32_t* totals = a_.scratch.totals + half() * a_.num_experts;
    for (int e = threadIdx.x; e < a_.num_experts; e += kPlanThreads) {
      if (slots_of_[e] != 0) atomicAdd(totals + e, slots_of_[e]);
    }
  }

  // ---- place ----

  __device__ std::uint32_t total(int expert) const {
    return __ldcg(a_.scratch.totals + half() * a_.num_experts + expert);
  }

  /// Counts of all CTAs before this one, column by column.
  __device__ void sum_earlier_ctas() const {
    const int ctas = static_cast<int>(blockIdx.x);
    for (int column = lane_index(); column < columns(); column += 32) {
      std::uint32_t sum = 0;
#pragma unroll 8
      for (int c = warp_index(); c < ctas; c += kPlanWarps) {
        sum += __ldcg(a_.scratch.cta_counts + c * columns() + column);
      }
      if (sum != 0) atomicAdd(before_cta_ + column, sum);
    }
  }

  /// Rows of every rank, pad rows included; of this one, where each segment begins.
  __device__ void lay_out_segments() const {
    for (int r = warp_index(); r < a_.num_ranks; r += kPlanWarps) {
      std::int64_t begin = 0;
      for (int e = lane_index(); e - lane_index() < local_; e += 32) {
        const std::int64_t rows = e < local_ ? total(r * local_ + e) : 0;
        const std::int64_t padded = round_up<std::int64_t>(rows, a_.row_align);
        const std::int64_t up_to = warp_inclusive_sum(padded);
        // Of use where it fits 32 bits; elsewhere the capacity is exceeded.
        if (r == a_.rank && e < local_) {
          segment_[e] = static_cast<std::uint32_t>(begin + up_to - padded);
        }
        begin += __shfl_sync(kWholeWarp, up_to, 31);
      }
      if (lane_index() == 0) cta_.rank_rows[r] = begin;
    }
  }

  /// The same in every thread of the grid.
  __device__ RoutingFault find_fault() const {
    using Kind = RoutingFault::Kind;
    if (cta_.tokens_fault >= 0) {
      return {Kind::kTokens, cta_.tokens_fault, -1, -1, cta_.tokens[cta_.tokens_fault]};
    }
    const unsigned long long bad = __ldcg(a_.scratch.first_bad + half());
    if (bad != 0) return id_fault(~bad);
    const RoutingFault fullest = fullest_rank();
    if (fullest.value > a_.capacity) return fullest;
    return {};
  }

  /// The rank that receives most rows; of use where all ids are possible.
  __device__ RoutingFault fullest_rank() const {
    using Kind = RoutingFault::Kind;
    RoutingFault worst{Kind::kCapacity, 0, -1, -1, 0};
    for (int r = 0; r < a_.num_ranks; ++r) {
      if (cta_.rank_rows[r] > worst.value) {
        worst.rank = r;
        worst.value = cta_.rank_rows[r];
      }
    }
    return worst;
  }

  __device__ RoutingFault id_fault(unsigned long long slot) const {
    const auto token = static_cast<int>(slot / a_.topk);
    int source = 0;
    while (token >= cta_.token_begin[source + 1]) ++source;
    const std::int64_t own_token = token - cta_.token_begin[source];
    const auto k = static_cast<std::int32_t>(slot % a_.topk);
    const auto* ids = at_rank<const std::int32_t>(a_.rank, ids_offset(source));
    return {RoutingFault::Kind::kExpertId, source, own_token, k, ids[own_token * a_.topk + k]};
  }

  __device__ void finish() const {
    sum_earlier_ctas();
    lay_out_segments();
    __syncthreads();
    // All CTAs have read the epoch: they have passed the barrier.
    if (blockIdx.x == 0 && threadIdx.x == 0) *a_.scratch.epoch = cta_.epoch;
    const RoutingFault fault = find_fault();
    if (blockIdx.x == 0 && threadIdx.x == 0 && a_.overflow != nullptr) {
      a_.overflow[0] = overflow_value(fault);
      a_.overflow[1] = overflow_value(fault) == 2 ? 0 : fullest_rank().value;
    }
    if (fault.kind != RoutingFault::Kind::kNone) {
      if (blockIdx.x == 0) {
        make_empty({.fault = fault, .expired = 0});
        if (threadIdx.x == 0 && a_.overflow == nullptr) report(fault);
      }
      return;
    }
    write_counts();
    place();
    write_pad_rows();
  }

  __device__ void report(const RoutingFault& fault) const {
    if (a_.report->fault.kind == RoutingFault::Kind::kNone) a_.report->fault = fault;
  }

  __device__ void make_empty(const PlanStatus& status) const {
    for (int e = threadIdx.x; e <= local_; e += kPlanThreads) {
      if (e < local_) a_.plan.tokens_per_expert[e] = 0;
      a_.plan.segment_begin[e] = 0;
    }
    for (int r = threadIdx.x; r < a_.num_ranks; r += kPlanThreads) a_.plan.tokens_per_rank[r] = 0;
    if (threadIdx.x == 0) {
      *a_.plan.num_pulls = 0;
      *a_.plan.status = status;
    }
  }

  __device__ void write_counts() const {
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
      const std::uint32_t own = __ldcg(a_.scratch.cta_counts + blockIdx.x * columns() + local_);
      *a_.plan.num_pulls = before_cta_[local_] + own;
    }
    if (blockIdx.x != 0) return;
    for (int e = threadIdx.x; e < local_; e += kPlanThreads) {
      a_.plan.tokens_per_expert[e] = total(first_expert_ + e);
      a_.plan.segment_begin[e] = segment_[e];
    }
    for (int r = threadIdx.x; r < a_.num_ranks; r += kPlanThreads) {
      a_.plan.tokens_per_rank[r] = cta_.tokens[r];
    }
    if (threadIdx.x == 0) {
      a_.plan.segment_begin[local_] = cta_.rank_rows[a_.rank];
      *a_.plan.status = PlanStatus{};
    }
  }

  /// The row of this lane's slot, where its expert is local; all lanes call it.
  __device__ std::int32_t take_row(std::int32_t id) const {
    const unsigned same = __match_any_sync(kWholeWarp, id);
    std::int32_t row = -1;
    std::uint32_t* next = nullptr;
    if (is_local(id)) {
      const int e = id - first_expert_;
      const int earlier = __popc(same & lanes_below(lane_index()));
      next = warp_rows_of_ + warp_index() * local_ + e;
      row = static_cast<std::int32_t>(segment_[e] + before_cta_[e] + *next) + earlier;
      if (earlier != 0) next = nullptr;
    }
    __syncwarp();  // all have read
    if (next != nullptr) *next += __popc(same);
    __syncwarp();
    return row;
  }

  /// How many of the token's rows have a smaller number; all lanes call it.
  __device__ int order_in_token(std::int32_t row) const {
    const int first = lane_index() / a_.topk * a_.topk;
    int smaller = 0;
    for (int k = 0; k < a_.topk; ++k) {
      const std::int32_t other = __shfl_sync(kWholeWarp, row, first + k);  // lanes past 31 wrap
      if (other >= 0 && other < row) ++smaller;
    }
    return smaller;
  }

  __device__ void place() const {
    int next_row = static_cast<int>(before_cta_[local_ + 1]) + cta_.warp_rows[warp_index()];
    int next_pull = static_cast<int>(before_cta_[local_]) + cta_.warp_pulls[warp_index()];
    const int token_lane = lane_index() / a_.topk * a_.topk;
    for_each_step([&](const Slot& s) {
      const std::int32_t row = take_row(s.id);
      const int order = order_in_token(row);
      const unsigned local = __ballot_sync(kWholeWarp, row >= 0);
      const unsigned mine = local & token_lanes();
      const bool leads = leads_token() && s.present && mine != 0;
      const unsigned leaders = __ballot_sync(kWholeWarp, leads);
      const int pull = next_pull + __popc(leaders & lanes_below(token_lane));
      const int first_row = next_row + __popc(local & lanes_below(token_lane));
      const int token = s.token - cta_.token_begin[s.source];
      if (row >= 0) {
        a_.plan.row_origin[row] = {s.source, token, lane_index() - token_lane};
        a_.plan.pull_rows[first_row + order] = row;
        a_.plan.pull_of_row[row] = pull;
      }
      if (leads) a_.plan.pulls[pull] = {s.source, token, first_row, __popc(mine)};
      next_row += __popc(local);
      next_pull += __popc(leaders);
    });
  }

  __device__ void write_pad_rows() const {
    const int warps = static_cast<int>(gridDim.x) * kPlanWarps;
    for (int e = static_cast<int>(blockIdx.x) * kPlanWarps + warp_index(); e < local_; e += warps) {
      const std::int64_t rows = total(first_expert_ + e);
      const std::int64_t end = segment_[e] + round_up<std::int64_t>(rows, a_.row_align);
      for (std::int64_t row = segment_[e] + rows + lane_index(); row < end; row += 32) {
        a_.plan.row_origin[row] = RowOrigin{};
      }
    }
  }

  const PlanArgs& a_;
  PlanCta& cta_;
  const int local_;
  const int first_expert_;
  std::uint32_t* const warp_rows_of_;  // [warps, local experts]
  std::uint32_t* const slots_of_;      // [E]
  std::uint32_t* const before_cta_;    // [local experts + 2]: see columns()
  std::uint32_t* const segment_;       // [local experts]: segment_begin
};

}  // namespace uniep::cuda
