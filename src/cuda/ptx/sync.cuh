#pragma once

#include <cstdint>

// Signals between threads of one GPU (gpu scope) and of several (sys scope), by name.

namespace uniep::cuda::ptx {

__device__ inline std::uint32_t load_acquire_sys(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ inline std::uint32_t load_acquire_gpu(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ inline std::uint32_t load_relaxed_gpu(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ inline void add_release_sys(std::uint32_t* p, std::uint32_t amount) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(amount) : "memory");
}

__device__ inline void add_release_gpu(std::uint32_t* p, std::uint32_t amount) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(amount) : "memory");
}

__device__ inline std::uint64_t global_timer_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

}  // namespace uniep::cuda::ptx
