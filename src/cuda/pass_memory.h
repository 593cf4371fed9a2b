#pragma once

#include "cuda/launch.h"
#include "layout/workspace.h"
#include "uniep/problem.h"

namespace uniep::cuda {

/// Where counters stood when a pass began, and what else its launches keep: for this rank alone,
/// written anew by every `enter`.
struct PassScratchLayout {
  std::int64_t rows_ready;  // uint32, as the counters of LocalCounterLayout and `arrived`
  std::int64_t tile_done;
  std::int64_t expert_done;
  std::int64_t arrived;
  std::int64_t published;  // uint32 [1], alike for all ranks
  std::int64_t tickets;    // uint32 [kMaxLaunches]
  std::int64_t ctas_done;  // uint32 [1]: 0 between launches; zeroed once
  std::int64_t failed;     // uint32 [1]: a wait expired; the group is unusable; zeroed once
  std::int64_t bytes;

  PassScratchLayout(const Problem& p, int num_ranks) {
    uniep::detail::Ranges r;
    const std::int64_t tiles = ceil_div(capacity_rows(p, num_ranks), kMinTileM);
    rows_ready = r.take<std::uint32_t>(tiles);
    tile_done = r.take<std::uint32_t>(tiles);
    expert_done = r.take<std::uint32_t>(p.num_experts / num_ranks);
    arrived = r.take<std::uint32_t>(SymmetricLayout::num_token_blocks(p) * num_ranks);
    published = r.take<std::uint32_t>(1);
    tickets = r.take<std::uint32_t>(kMaxLaunches);
    ctas_done = r.take<std::uint32_t>(1);
    failed = r.take<std::uint32_t>(1);
    bytes = r.bytes();
  }
};

/// The memory that all passes of one rank's layer share.
struct PassMemory {
  std::byte* heaps[kMaxRanks] = {};  // SymmetricLayout, by rank
  std::byte* counters = nullptr;     // LocalCounterLayout
  std::byte* scratch = nullptr;      // PassScratchLayout
  WaitFailure* failure = nullptr;    // in host memory
  CallState* calls = nullptr;        // this rank's; null in tests without one
  DeviceTrace trace{};
};

/// What one pass has of its own.
struct PassCall {
  int limit_ms = 0;  // of every wait
  DeviceFaults faults{};
};

/// The context of a pass, but for the tensors.
DeviceContext device_context(const Problem& problem, const PassView& view, const PassMemory& memory,
                             const PassCall& call);

/// `tokens` is x or dy, `probs` topk_probs or null; `plan` says whether there is anything to do,
/// and is null where the host knows that there is.
EnterArgs enter_args(const Problem& problem, int num_ranks, const PassMemory& memory,
                     const bf16* tokens, const float* probs, const PlanStatus* plan);

}  // namespace uniep::cuda
