#pragma once

#include "cuda/device/plan_state.cuh"

namespace uniep::cuda {

/// Count: every warp takes a run of tokens, in canonical order, and counts its rows of every local
/// expert.
class PlanCounter : public PlanState {
 public:
  using PlanState::PlanState;

  __device__ void read_tokens() const {
    if (threadIdx.x < a_.num_ranks) {
      const int r = static_cast<int>(threadIdx.x);
      cta_.tokens[r] = __ldcg(at_rank<const std::int64_t>(a_.rank, tokens_offset(r)));
      if (a_.pool.pages > 0) {
        const auto* count = at_rank<const std::int64_t>(a_.rank, pool_offset(r));
        cta_.pools[r] = {__ldcg(count), __ldcg(count + 1)};
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      cta_.tokens_fault = -1;
      cta_.token_begin[0] = 0;
      for (int r = 0; r < a_.num_ranks; ++r) {
        const std::int64_t t = cta_.tokens[r];
        const bool possible = t >= 0 && t <= a_.order.most_tokens;
        if (!possible && cta_.tokens_fault < 0) cta_.tokens_fault = r;
        cta_.token_begin[r + 1] = cta_.token_begin[r] + (possible ? static_cast<int>(t) : 0);
      }
    }
    __syncthreads();
  }

  __device__ void count() const {
    std::uint32_t* my_rows = warp_rows_of_ + warp_index() * local_;
    int rows = 0;
    int pulls = 0;
    unsigned long long bad = 0;  // ~(index in topk_ids) of the first impossible id
    for_each_step([&](const Slot& s) {
      if (s.expert >= 0) {
        atomicAdd(slots_of_ + s.expert, 1u);
        if (is_local(s.expert)) atomicAdd(my_rows + s.expert - first_expert_, 1u);
      } else if (s.expert == kImpossible && bad == 0) {
        bad = ~(static_cast<unsigned long long>(s.token) * a_.topk + slot_of_lane());
      }
      if (a_.pool.shape.tokens > 0) count_received(s.expert);
      const unsigned local = __ballot_sync(kWholeWarp, is_local(s.expert));
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
    for (int i = threadIdx.x; i < num_totals(); i += kPlanThreads) {
      if (slots_of_[i] != 0) atomicAdd(totals(half()) + i, slots_of_[i]);
    }
  }

 private:
  /// The first of a token's slots that lie with a rank counts the token there; all lanes call it.
  __device__ void count_received(std::int32_t expert) const {
    const int rank = expert >= 0 ? expert / local_ : a_.num_ranks;
    const unsigned same = __match_any_sync(kWholeWarp, rank) & token_lanes();
    const bool first = (same & lanes_below(lane_index())) == 0;
    if (first && rank < a_.num_ranks) atomicAdd(slots_of_ + num_experts() + rank, 1u);
  }
};

}  // namespace uniep::cuda
