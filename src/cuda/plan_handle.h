#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "cuda/plan_memory.h"
#include "cuda/told_faults.h"
#include "layer/callers_memory.h"
#include "plan/plan_data.h"
#include "uniep/routing_plan.h"

namespace uniep::cuda {

/// A plan in device memory.
class CudaPlan final : public RemotePlan {
 public:
  /// `number`: of the layer's plans, from 1. `captured`: every replay of a CUDA graph makes it
  /// anew. Without a stream it was made somewhere else, and lies here, on `device`. `told`: of the
  /// layer.
  CudaPlan(int device, std::shared_ptr<std::byte> memory, const DevicePlanLayout& layout,
           std::shared_ptr<ToldFaults> told, std::int64_t number,
           std::optional<cudaStream_t> stream, bool captured)
      : device_(device),
        told_(std::move(told)),
        memory_(std::move(memory)),
        plan_(device_plan(memory_.get(), layout)),
        number_(number),
        stream_(stream),
        captured_(captured) {}

  const DevicePlan& device() const { return plan_; }
  const std::shared_ptr<std::byte>& memory() const { return memory_; }
  std::int64_t number() const { return number_; }
  const std::shared_ptr<ToldFaults>& told_faults() const { return told_; }

  /// Whether the plan lies in memory of the caller, who may have other use for it by now.
  bool is_callers() const { return uniep::is_callers(memory_); }

  /// Whether it can be used, as its last making said; waits for the stream.
  PlanStatus status() const;

  // Both throw where it cannot be used.
  void fetch(PlanData& p) override;
  /// The counts; those of a flagged plan that has a fault are 0.
  PlanCounts fetch_counts(const PlanData& p) override;

 private:
  /// The status, with a fault if the plan is flagged; throws for one else, and where nobody can
  /// say.
  PlanStatus usable_status(const PlanData& p) const;

  const int device_;
  const std::shared_ptr<ToldFaults> told_;
  std::shared_ptr<std::byte> memory_;
  DevicePlan plan_;
  const std::int64_t number_;
  const std::optional<cudaStream_t> stream_;
  const bool captured_;
};

/// The plan as a CUDA layer made it; null where another did.
const CudaPlan* cuda_plan(const RoutingPlan& plan);

/// The device's arrays of a plan that a CUDA layer made; throws for any other.
const DevicePlan& on_device(const RoutingPlan& plan);

}  // namespace uniep::cuda
