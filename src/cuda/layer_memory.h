#pragma once

#include <optional>

#include "cuda/device_array.h"
#include "cuda/device_plan.h"
#include "cuda/host_visible.h"
#include "cuda/pass_clock.h"
#include "cuda/pass_memory.h"
#include "cuda/pass_trace.h"

namespace uniep::cuda {

/// What a layer has for itself from its construction to its end, on this thread's device.
struct LayerMemory {
  LayerMemory(const Problem& problem, int num_ranks)
      : counters(LocalCounterLayout(problem, num_ranks).bytes),
        pass_scratch(PassScratchLayout(problem, num_ranks).bytes),
        plan_scratch(PlanScratchLayout(problem, num_ranks).bytes) {}

  DeviceArray<std::byte> counters;
  DeviceArray<std::byte> pass_scratch;
  DeviceArray<std::byte> plan_scratch;
  HostVisible<WaitFailure> failure;
  HostVisible<PlanReport> report;
  PassClock clock;
  std::optional<PassTrace> trace;
};

}  // namespace uniep::cuda
