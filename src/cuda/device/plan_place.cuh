#pragma once

#include "cuda/device/plan_state.cuh"

namespace uniep::cuda {

/// Place: rows before a warp are those of the segments before, of earlier CTAs, of earlier warps;
/// it walks its tokens again and gives out addresses in order. Where the routing has a fault, the
/// plan is empty instead.
class PlanPlacer : public PlanState {
 public:
  using PlanState::PlanState;

  __device__ void finish() const {
    sum_earlier_ctas();
    lay_out_segments();
    __syncthreads();
    // All CTAs have read the epoch: they have passed the barrier.
    if (blockIdx.x == 0 && threadIdx.x == 0) *a_.scratch.epoch = cta_.epoch;
    const RoutingFault fault = find_fault();
    if (blockIdx.x == 0 && threadIdx.x == 0 && a_.overflow != nullptr) {
      a_.overflow[0] = static_cast<std::int64_t>(overflow_of(fault));
      a_.overflow[1] = overflow_amount(fault);
    }
    if (fault.kind != RoutingFault::Kind::kNone) {
      if (blockIdx.x == 0) {
        make_empty({.fault = fault, .expired = 0});
        if (threadIdx.x == 0 && a_.overflow == nullptr) report(fault);
      }
      return;
    }
    write_counts();
    take_pages();
    place();
    write_pad_rows();
  }

  __device__ void make_empty(const PlanStatus& status) const {
    for (int e = threadIdx.x; e <= local_; e += kPlanThreads) {
      if (e < local_) a_.plan.tokens_per_expert[e] = 0;
      a_.plan.segment_begin[e] = 0;
    }
    for (int r = threadIdx.x; r < a_.num_ranks; r += kPlanThreads) a_.plan.tokens_per_rank[r] = 0;
    if (threadIdx.x == 0) {
      *a_.plan.num_pages = 0;
      *a_.plan.num_pulls = 0;
      *a_.plan.status = status;
    }
  }

 private:
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
      unsigned long long fullest = 0;
      for (int e = lane_index(); e - lane_index() < local_; e += 32) {
        const std::int64_t rows = e < local_ ? total(r * local_ + e) : 0;
        // If two experts have as many rows, the one with the lower number is the fullest.
        const auto number = static_cast<std::uint32_t>(r * local_ + e);
        fullest = max_of(fullest, static_cast<unsigned long long>(rows) << 32 | ~number);
        const std::int64_t padded = round_up<std::int64_t>(rows, a_.row_align);
        const std::int64_t up_to = warp_inclusive_sum(padded);
        // The beginning is of use if it fits 32 bits; else the capacity is exceeded.
        if (r == a_.rank && e < local_) {
          segment_[e] = static_cast<std::uint32_t>(begin + up_to - padded);
        }
        begin += __shfl_sync(kWholeWarp, up_to, 31);
      }
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        fullest = max_of(fullest, __shfl_xor_sync(kWholeWarp, fullest, lanes));
      }
      if (lane_index() == 0) {
        cta_.rank_rows[r] = begin;
        cta_.fullest[r] = fullest;
      }
    }
  }

  /// The fault of the routing, the same in every thread of the grid.
  __device__ RoutingFault find_fault() const {
    using Kind = RoutingFault::Kind;
    if (cta_.tokens_fault >= 0) {
      return {Kind::kTokens, cta_.tokens_fault, -1, -1, cta_.tokens[cta_.tokens_fault]};
    }
    const unsigned long long bad = __ldcg(a_.scratch.first_bad + half());
    if (bad != 0) return id_fault(~bad);
    const RoutingFault fullest = fullest_rank();
    if (fullest.value > a_.capacity) return fullest;
    const RoutingFault expert = fullest_expert();
    if (a_.backward_rows > 0 && expert.value > a_.backward_rows) return expert;
    return a_.pool.pages > 0 ? fullest_pool() : RoutingFault{};
  }

  /// Pages that a rank saves.
  __device__ std::int64_t pages_of(int rank) const {
    return a_.pool.shape.pages_of(cta_.rank_rows[rank], received(rank));
  }

  /// The rank whose row pool lacks most pages, if any does.
  __device__ RoutingFault fullest_pool() const {
    RoutingFault worst{};
    std::int64_t most = 0;
    for (int r = 0; r < a_.num_ranks; ++r) {
      const PageCount& pool = cta_.pools[r];
      const std::int64_t needed = pages_of(r);
      if (needed - pool.free <= most) continue;
      most = needed - pool.free;
      worst.kind = RoutingFault::Kind::kPages;
      worst.rank = r;
      worst.value = needed;
      worst.held = pool.pages - pool.free;
      worst.pool = pool.pages;
    }
    return worst;
  }

  /// Element 1 of CallOptions::overflow.
  __device__ std::int64_t overflow_amount(const RoutingFault& fault) const {
    if (overflow_of(fault) == Overflow::kImpossible) return 0;
    if (fault.kind == RoutingFault::Kind::kExpertRows) return fault.value;
    if (fault.kind != RoutingFault::Kind::kPages) return fullest_rank().value;
    return bytes_for_pages(a_.pool.page_bytes, fault.held + fault.value);
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

  /// The expert that receives most rows.
  __device__ RoutingFault fullest_expert() const {
    unsigned long long fullest = 0;
    for (int r = 0; r < a_.num_ranks; ++r) fullest = max_of(fullest, cta_.fullest[r]);
    const auto expert = static_cast<std::int32_t>(~static_cast<std::uint32_t>(fullest));
    return {RoutingFault::Kind::kExpertRows, expert / local_, -1, expert,
            round_up<std::int64_t>(static_cast<std::int64_t>(fullest >> 32), a_.row_align)};
  }

  __device__ RoutingFault id_fault(unsigned long long slot) const {
    int source = 0;
    const std::int64_t own_token = find_token(static_cast<int>(slot / a_.topk), source);
    const auto k = static_cast<std::int32_t>(slot % a_.topk);
    const auto* ids = at_rank<const std::int32_t>(a_.rank, ids_offset(source));
    return {RoutingFault::Kind::kExpertId, source, own_token, k, ids[own_token * a_.topk + k]};
  }

  __device__ void report(const RoutingFault& fault) const {
    if (a_.report->fault.kind == RoutingFault::Kind::kNone) a_.report->fault = fault;
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

  /// Takes the plan's pages. Only CTA 0 does, which alone has read how many are free, before the
  /// grid's barrier.
  __device__ void take_pages() const {
    if (blockIdx.x != 0) return;
    const PageStack& stack = a_.pool.stack;
    const auto free = static_cast<std::int32_t>(a_.pool.pages > 0 ? cta_.pools[a_.rank].free : 0);
    const auto count = static_cast<std::int32_t>(a_.pool.pages > 0 ? pages_of(a_.rank) : 0);
    for (int group = threadIdx.x; group < count; group += kPlanThreads) {
      a_.plan.pages[group] = stack.taken(free, group);
    }
    if (threadIdx.x != 0) return;
    *a_.plan.num_pages = count;
    if (a_.pool.pages == 0) return;
    stack.free[0] = free - count;
    stack.free[1] = min_of(stack.free[1], free - count);
  }

  /// The row of this lane's slot, where its expert is local; all lanes call it.
  __device__ std::int32_t take_row(std::int32_t expert) const {
    const unsigned same = __match_any_sync(kWholeWarp, expert);
    std::int32_t row = -1;
    std::uint32_t* next = nullptr;
    if (is_local(expert)) {
      const int e = expert - first_expert_;
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
    const int first = first_lane_of_token();
    int smaller = 0;
    for (int k = 0; k < slots_; ++k) {
      const std::int32_t other = __shfl_sync(kWholeWarp, row, first + k);  // lanes past 31 wrap
      if (other >= 0 && other < row) ++smaller;
    }
    return smaller;
  }

  __device__ void place() const {
    int next_row = static_cast<int>(before_cta_[local_ + 1]) + cta_.warp_rows[warp_index()];
    int next_pull = static_cast<int>(before_cta_[local_]) + cta_.warp_pulls[warp_index()];
    const int token_lane = first_lane_of_token();
    for_each_step([&](const Slot& s) {
      const std::int32_t row = take_row(s.expert);
      const int order = order_in_token(row);
      const unsigned local = __ballot_sync(kWholeWarp, row >= 0);
      const unsigned mine = local & token_lanes();
      const bool leads = leads_token() && s.present && mine != 0;
      const unsigned leaders = __ballot_sync(kWholeWarp, leads);
      const int pull = next_pull + __popc(leaders & lanes_below(token_lane));
      const int first_row = next_row + __popc(local & lanes_below(token_lane));
      if (row >= 0) {
        a_.plan.row_origin[row] = {s.source, s.own_token, lane_index() - token_lane};
        a_.plan.pull_rows[first_row + order] = row;
        a_.plan.pull_of_row[row] = pull;
      }
      if (leads) a_.plan.pulls[pull] = {s.source, s.own_token, first_row, __popc(mine)};
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
};

}  // namespace uniep::cuda
