#pragma once

#include "cuda/device/grid_barrier.cuh"
#include "cuda/device/plan_state.cuh"
#include "cuda/device/poll.cuh"

namespace uniep::cuda {

/// Push: this rank's ids and number of tokens to every rank; and the waits of the plan's kernel,
/// for what peers push and for the other CTAs.
class PlanExchanger : public PlanState {
 public:
  using PlanState::PlanState;

  __device__ void begin() const {
    if (threadIdx.x == 0) {
      if (blockIdx.x == 0) begin_call(a_.calls);
      cta_.epoch = ptx::load_relaxed_gpu(a_.scratch.epoch) + 1;
      cta_.failed = ptx::load_relaxed_gpu(a_.scratch.failed) != 0;
    }
    const int zeros = kPlanWarps * local_ + num_totals() + local_ + 2;  // arrays lie in a row
    for (int i = threadIdx.x; i < zeros; i += kPlanThreads) warp_rows_of_[i] = 0;
    __syncthreads();
    clear_other_half();
  }

  __device__ void push() const {
    constexpr int kParts = PlanExchangeLayout::kParts;
    // Every rank refuses an impossible number of tokens, but none may write past the buffers.
    const bool possible = a_.tokens >= 0 && a_.tokens <= a_.order.most_tokens;
    const std::int64_t slots = possible ? a_.tokens * a_.topk : 0;
    const std::int64_t units = ceil_div<std::int64_t>(slots, 4);
    const int peer = static_cast<int>(threadIdx.x);
    std::uint32_t parts = 0;
    for (int part = blockIdx.x; part < kParts; part += gridDim.x, ++parts) {
      push_units(units * part / kParts, units * (part + 1) / kParts, slots);
      if (part == 0 && peer < a_.num_ranks) {
        *at_rank<std::int64_t>(peer, tokens_offset(a_.rank)) = a_.tokens;
        if (a_.pool.pages > 0) {
          *at_rank<PageCount>(peer, pool_offset(a_.rank)) = {a_.pool.pages, *a_.pool.stack.free};
        }
      }
    }
    __syncthreads();
    if (parts > 0 && peer < a_.num_ranks) {
      std::uint32_t* flags = at_rank<std::uint32_t>(peer, a_.exchange.layout.flags);
      ptx::add_release_system(flags + a_.rank, parts);
    }
  }

  __device__ bool wait_for_peers() const {
    bool ok = true;
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < a_.num_ranks) {
      const std::uint32_t* flag = at_rank<std::uint32_t>(a_.rank, a_.exchange.layout.flags) + peer;
      constexpr std::uint32_t kParts = PlanExchangeLayout::kParts;
      ok = poll([&] { return ptx::load_acquire_system(flag); }, (cta_.epoch - 1) * kParts, kParts,
                peer, a_.limit_ticks);
    }
    return __syncthreads_and(ok);
  }

  /// CTAs wait for one another longer than for peers, so that the peer that is missing is named.
  __device__ bool wait_for_grid() const {
    std::uint32_t* arrivals = a_.scratch.plan_arrivals + half();
    grid_arrive(arrivals);
    bool ok = true;
    if (threadIdx.x == 0) {
      ok = poll([&] { return ptx::load_acquire_gpu(arrivals); }, 0, gridDim.x, -1,
                a_.limit_ticks + a_.limit_ticks / 4);
    }
    return __syncthreads_and(ok);
  }

 private:
  /// What plans take in turns was last used by the plan before, and the next one finds it zero.
  __device__ void clear_other_half() const {
    if (blockIdx.x != 0) return;
    const int other = 1 - half();
    for (int i = threadIdx.x; i < num_totals(); i += kPlanThreads) totals(other)[i] = 0;
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

  /// Waits until `load()` is `expected` past `base` (modulo 2^32); false if the wait ends
  /// otherwise.
  template <class Load>
  __device__ bool poll(Load load, std::uint32_t base, std::uint32_t expected, int peer,
                       std::uint32_t limit_ticks) const {
    std::uint32_t seen = 0;
    const auto reached = [&] {
      seen = load() - base;
      return static_cast<std::int32_t>(seen - expected) >= 0;
    };
    const PollEnd end = poll_until(reached, a_.scratch.failed, a_.calls, limit_ticks);
    if (end == PollEnd::kReached) return true;
    if (end != PollEnd::kOthersFailed) fail(peer, expected, seen, end == PollEnd::kRefused);
    return false;
  }
};

}  // namespace uniep::cuda
