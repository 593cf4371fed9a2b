#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "cuda/device_plan.h"
#include "plan/plan_data.h"
#include "uniep/routing_plan.h"

namespace uniep::cuda {

/// A plan in device memory.
class CudaPlan final : public RemotePlan {
 public:
  /// `captured`: every replay of a CUDA graph makes it anew.
  CudaPlan(std::shared_ptr<std::byte> memory, const DevicePlanLayout& layout, cudaStream_t stream,
           bool captured)
      : memory_(std::move(memory)),
        plan_(device_plan(memory_.get(), layout)),
        stream_(stream),
        captured_(captured) {}

  const DevicePlan& device() const { return plan_; }

  void fetch(PlanData& p) override;

 private:
  std::shared_ptr<std::byte> memory_;
  DevicePlan plan_;
  cudaStream_t stream_;
  const bool captured_;
};

/// The device's arrays of a plan that a CUDA layer made; throws for any other.
const DevicePlan& on_device(const RoutingPlan& plan);

}  // namespace uniep::cuda
