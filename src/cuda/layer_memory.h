#pragma once

#include <optional>

#include "cuda/device_array.h"
#include "cuda/device_plan.h"
#include "cuda/host_visible.h"
#include "cuda/pass_clock.h"
#include "cuda/pass_memory.h"
#include "cuda/pass_trace.h"

namespace uniep::cuda {

/// A layer's memory that peers reach.
struct LayerSymmetricLayout {
  std::int64_t passes;    // SymmetricLayout
  std::int64_t exchange;  // PlanExchangeLayout
  std::int64_t calls;     // CallState
  std::int64_t bytes;

  LayerSymmetricLayout(const Problem& p, int num_ranks) {
    uniep::detail::Ranges r;
    passes = r.take<std::byte>(SymmetricLayout(p, num_ranks).bytes);
    exchange = r.take<std::byte>(PlanExchangeLayout(p, num_ranks).bytes);
    calls = r.take<CallState>(1);
    bytes = r.bytes();
  }
};

/// A layer's memory for its rank alone. The first part lives as long as the layer; the rest is that
/// of one call, which plans and saved tensors are no part of.
struct LayerWorkspaceLayout {
  std::int64_t counters;      // LocalCounterLayout
  std::int64_t pass_scratch;  // PassScratchLayout
  std::int64_t plan_scratch;  // PlanScratchLayout
  std::int64_t kept_bytes;
  std::int64_t order;  // DeviceOrderLayout of any schedule
  std::int64_t rows;   // RowLayout of the capacity, of either pass
  std::int64_t bytes;

  LayerWorkspaceLayout(const Problem& p, int num_ranks) {
    uniep::detail::Ranges r;
    counters = r.take<std::byte>(LocalCounterLayout(p, num_ranks).bytes);
    pass_scratch = r.take<std::byte>(PassScratchLayout(p, num_ranks).bytes);
    plan_scratch = r.take<std::byte>(PlanScratchLayout(p, num_ranks).bytes);
    kept_bytes = r.bytes();
    order = r.take<std::byte>(most_order_bytes(p, num_ranks));
    rows = r.take<std::byte>(RowLayout(p, capacity_rows(p, num_ranks), Pass::kBackward).bytes);
    bytes = r.bytes();
  }
};

/// What a layer has for itself from its construction to its end, on this thread's device.
class LayerOwnMemory {
 public:
  /// In `workspace`, LayerWorkspaceLayout bytes whose first part is cleared here; where it is null,
  /// that part is allocated.
  LayerOwnMemory(const Problem& problem, int num_ranks, std::byte* workspace)
      : layout_(problem, num_ranks),
        kept_(workspace == nullptr ? layout_.kept_bytes : 0),
        workspace_(workspace) {
    if (workspace == nullptr) return;
    check_cuda(cudaMemset(workspace, 0, static_cast<std::size_t>(layout_.kept_bytes)),
               "clear the workspace");
    check_cuda(cudaDeviceSynchronize(), "clear the workspace");
  }

  std::byte* counters() const { return kept() + layout_.counters; }
  std::byte* pass_scratch() const { return kept() + layout_.pass_scratch; }
  std::byte* plan_scratch() const { return kept() + layout_.plan_scratch; }
  /// Of the call at hand, in the caller's workspace; null where there is none.
  std::byte* order() const { return workspace_ == nullptr ? nullptr : workspace_ + layout_.order; }
  std::byte* rows() const { return workspace_ == nullptr ? nullptr : workspace_ + layout_.rows; }

  HostVisible<WaitFailure> failure;
  HostVisible<PlanReport> report;
  PassClock clock;
  std::optional<PassTrace> trace;

 private:
  std::byte* kept() const { return workspace_ == nullptr ? kept_.data() : workspace_; }

  const LayerWorkspaceLayout layout_;
  DeviceArray<std::byte> kept_;
  std::byte* const workspace_;
};

}  // namespace uniep::cuda
