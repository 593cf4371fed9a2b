#pragma once

#include "schedule/constraints.h"
#include "schedule/open_sizes.h"
#include "tune/book/cache.h"
#include "uniep/problem.h"

namespace uniep::tune::testing {

/// A layer small enough to be simulated often, and where it runs.
inline const Problem kGpuLayer{
    .hidden = 2048, .intermediate = 768, .num_experts = 32, .topk = 8, .max_tokens = 1024};
inline constexpr Place kGpu{Backend::kCuda, 132};

/// Its forward pass on H200s.
inline TuneKey key_of(int ranks, const Problem& problem = kGpuLayer) {
  return {.backend = Backend::kCuda,
          .device = "NVIDIA H200 (compute capability 9.0, 132 SMs, 139.8 GiB)",
          .driver = "13.0",
          .library = "0.1.0",
          .hidden = problem.hidden,
          .intermediate = problem.intermediate,
          .num_experts = problem.num_experts,
          .topk = problem.topk,
          .ranks = ranks,
          .pass = Pass::kForward,
          .tokens = token_bucket(problem.max_tokens),
          .skew = 0};
}

}  // namespace uniep::tune::testing
