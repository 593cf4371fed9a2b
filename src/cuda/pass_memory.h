#pragma once

#include "base/expert_numbers.h"
#include "cuda/pass_kernels.h"
#include "layout/workspace.h"
#include "uniep/problem.h"

namespace uniep::cuda {

/// The counters when a pass began, and what else its launches keep: for this rank alone, written
/// anew by every `enter`.
struct PassScratchLayout {
  std::int64_t bases[kNumCounterKinds];  // uint32 [counters of the kind]; kSource: [1]
  std::int64_t drawn;                    // uint32 [kMaxLaunches]
  std::int64_t ctas_done;                // uint32 [1]: 0 between launches; zeroed once
  std::int64_t failed;       // uint32 [1]: a wait expired; the group is unusable; zeroed once
  std::int64_t expert_maps;  // CUtensorMap [kMostExpertMaps, experts]; of matrices that lie
                             // apart
  std::int64_t bytes;

  /// The maps of an expert: one for each matrix of each product that reads or writes it, in
  /// backward.
  static constexpr int kMostExpertMaps = 8;

  PassScratchLayout(const Problem& p, int num_ranks) {
    uniep::detail::Ranges r;
    const Extents extents = extents_of(p, num_ranks, capacity_rows(p, num_ranks));
    for (int kind = 0; kind < kNumCounterKinds; ++kind) {
      const CounterOf of = kLayerGraph.counters[kind].of;
      bases[kind] = r.take<std::uint32_t>(of == CounterOf::kSource ? 1 : counters_of(of, extents));
    }
    drawn = r.take<std::uint32_t>(kMaxLaunches);
    ctas_done = r.take<std::uint32_t>(1);
    failed = r.take<std::uint32_t>(1);
    expert_maps = r.take<CUtensorMap>(kMostExpertMaps * expert_numbers(p, num_ranks).of_rank());
    bytes = r.bytes();
  }
};

/// The memory that all passes of one rank's layer share.
struct PassMemory {
  std::byte* heaps[kMaxCudaRanks] = {};  // SymmetricLayout, by rank
  std::byte* counters = nullptr;         // LocalCounterLayout
  std::byte* scratch = nullptr;          // PassScratchLayout
  WaitFailure* failure = nullptr;        // in host memory
  CallState* calls = nullptr;            // this rank's; null in tests without one
  DeviceTrace trace{};
};

/// The context of a pass, but for the tensors. `limit_ms` is that of every wait.
DeviceContext device_context(const Problem& problem, const PassView& view, const PassMemory& memory,
                             int limit_ms, const DeviceFaultInjection& injection, CudaErf erf);

CUtensorMap* expert_maps(const Problem& problem, int num_ranks, const PassMemory& memory);

/// `plan` says whether there is anything to do, and is null where the host knows that there is.
EnterArgs enter_args(const Problem& problem, int num_ranks, const PassMemory& memory,
                     const PlanStatus* plan);

}  // namespace uniep::cuda
