#pragma once

#include "cuda/device_array.h"
#include "cuda/pass_memory.h"
#include "cuda/plan_memory.h"
#include "cuda/refusal.h"

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
/// of one call. Plans and tensors that have rows are no part of it.
struct LayerWorkspaceLayout {
  std::int64_t counters;      // LocalCounterLayout
  std::int64_t pass_scratch;  // PassScratchLayout
  std::int64_t plan_scratch;  // PlanScratchLayout
  std::int64_t kept_bytes;
  std::int64_t order;  // DeviceOrderLayout of any schedule
  std::int64_t bytes;

  LayerWorkspaceLayout(const Problem& p, int num_ranks) {
    uniep::detail::Ranges r;
    counters = r.take<std::byte>(LocalCounterLayout(p, num_ranks).bytes);
    pass_scratch = r.take<std::byte>(PassScratchLayout(p, num_ranks).bytes);
    plan_scratch = r.take<std::byte>(PlanScratchLayout(p, num_ranks).bytes);
    kept_bytes = r.bytes();
    order = r.take<std::byte>(most_order_bytes(p, num_ranks));
    bytes = r.bytes();
  }
};

/// Memory of LayerWorkspaceLayout, from a layer's construction to its end, on this thread's device:
/// the caller's, or the layer's own, which is the first part alone.
class LayerWorkspace {
 public:
  /// `callers`, if not null, has LayerWorkspaceLayout bytes, whose first part is cleared here.
  LayerWorkspace(const Problem& problem, int num_ranks, std::byte* callers)
      : layout_(problem, num_ranks),
        own_(callers == nullptr ? layout_.kept_bytes : 0),
        callers_(callers) {
    if (callers == nullptr) return;
    check_cuda(cudaMemset(callers, 0, static_cast<std::size_t>(layout_.kept_bytes)),
               "clear the workspace");
    check_cuda(cudaDeviceSynchronize(), "clear the workspace");
  }

  bool is_callers() const { return callers_ != nullptr; }

  std::byte* counters() const { return base() + layout_.counters; }
  std::byte* pass_scratch() const { return base() + layout_.pass_scratch; }
  std::byte* plan_scratch() const { return base() + layout_.plan_scratch; }
  /// The order of the call at hand; null if the workspace is the layer's own.
  std::byte* order() const { return is_callers() ? callers_ + layout_.order : nullptr; }

 private:
  std::byte* base() const { return is_callers() ? callers_ : own_.data(); }

  const LayerWorkspaceLayout layout_;
  const DeviceArray<std::byte> own_;
  std::byte* const callers_;
};

}  // namespace uniep::cuda
