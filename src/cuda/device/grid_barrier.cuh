#pragma once

#include <cstdint>

#include "cuda/ptx/sync.cuh"

// A barrier among the CTAs of a launch, all of which must be resident (a cooperative launch). The
// counter starts at zero. What any thread of the grid wrote before it arrived, every thread sees
// after it waited: __syncthreads makes thread 0 speak for its CTA.

namespace uniep::cuda {

__device__ inline void grid_arrive(std::uint32_t* counter) {
  __syncthreads();
  if (threadIdx.x == 0) ptx::add_release_gpu(counter, 1);
}

__device__ inline void grid_wait(const std::uint32_t* counter) {
  if (threadIdx.x == 0) {
    while (ptx::load_acquire_gpu(counter) < gridDim.x) {
    }
  }
  __syncthreads();
}

__device__ inline void grid_sync(std::uint32_t* counter) {
  grid_arrive(counter);
  grid_wait(counter);
}

}  // namespace uniep::cuda
