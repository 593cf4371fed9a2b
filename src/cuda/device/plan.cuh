#pragma once

#include "cuda/device/plan_count.cuh"
#include "cuda/device/plan_exchange.cuh"
#include "cuda/device/plan_place.cuh"

// The routing plan of one rank, by all CTAs of one launch: push, count, a barrier of the grid,
// place. Nothing is sorted, and no atomic operation decides an address: atomics only add up
// numbers.

namespace uniep::cuda {

__device__ inline void make_plan(const PlanArgs& args, PlanCta& cta, std::uint32_t* shared) {
  const PlanExchanger exchange(args, cta, shared);
  const PlanCounter counter(args, cta, shared);
  const PlanPlacer placer(args, cta, shared);
  exchange.begin();
  if (!cta.failed) {
    exchange.push();
    if (exchange.wait_for_peers()) {
      counter.read_tokens();
      counter.count();
      counter.publish_counts();
      if (exchange.wait_for_grid()) return placer.finish();
    }
  }
  placer.make_empty({.fault = {}, .expired = 1});
}

}  // namespace uniep::cuda
