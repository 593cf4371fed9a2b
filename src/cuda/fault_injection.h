#pragma once

#include <cstdint>
#include <vector>

#include "base/cuda/check_cuda.h"
#include "cuda/device/context.cuh"
#include "uniep/layer.h"

namespace uniep::cuda {

/// What kernels of `rank` need to know of `injection`, but for the number of the pass.
inline DeviceFaultInjection device_injection(const FaultInjection& injection, int rank) {
  DeviceFaultInjection d;
  d.max_delay_us = static_cast<std::uint32_t>(injection.max_delay_us);
  // Any odd factors do: kernels mix the bits.
  d.salt = static_cast<std::uint32_t>(injection.seed ^ injection.seed >> 32) * 0x9e3779b1u +
           static_cast<std::uint32_t>(rank) * 0x85ebca77u;
  if (injection.withhold_rank == rank) {
    d.withhold_stage = static_cast<int>(injection.withhold_stage);
    d.withhold_tile = injection.withhold_tile;
  }
  return d;
}

/// Counters that lie in `bytes` of device memory start at `first_count`. Waits for the device.
inline void start_counters(void* counters, std::int64_t bytes, std::uint32_t first_count) {
  const std::vector<std::uint32_t> values(static_cast<std::size_t>(bytes) / sizeof(first_count),
                                          first_count);
  check_cuda(cudaMemcpy(counters, values.data(), values.size() * sizeof(first_count),
                        cudaMemcpyHostToDevice),
             "set counters");
}

}  // namespace uniep::cuda
