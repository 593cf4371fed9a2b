#pragma once

#include "cuda/device/context.cuh"
#include "cuda/ptx/sync.cuh"

// LayerOptions::fault_injection in kernels: what is called before every wait and every signal. If
// nothing is injected, it is a branch on a kernel parameter that all threads take alike. All is
// inline: ptxas serialises wgmma in kernels with calls.

namespace uniep::cuda {

/// A task as an error and a withheld signal name it.
struct TaskName {
  Stage stage;
  int tile;  // index within the stage
};

__device__ __forceinline__ TaskName name_of(const Task& task) {
  return {task.stage, static_cast<int>(task.tile)};
}

/// Every bit of the result depends on every bit of `h` (the last step of MurmurHash3).
__device__ __forceinline__ std::uint32_t mixed(std::uint32_t h) {
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return h ^ h >> 16;
}

/// Other numbers for every task, and for every thread that has a part in it.
__device__ __forceinline__ std::uint32_t injected_number(const DeviceFaultInjection& injection,
                                                         const TaskName& task) {
  const std::uint32_t where = ptx::global_thread();
  const std::uint32_t what =
      static_cast<std::uint32_t>(task.tile) * kNumStages + static_cast<std::uint32_t>(task.stage);
  // Any odd factor does: the bits are mixed.
  const std::uint32_t pass = ptx::load_relaxed_gpu(injection.pass) * 0xc2b2ae3du;
  return mixed(mixed(injection.salt + pass + what) + where);
}

/// Half of the time none at all, as on the CPU: delays next to none find more orders than delays
/// everywhere.
__device__ __forceinline__ void random_delay(const DeviceFaultInjection& injection,
                                             const TaskName& task) {
  if (injection.max_delay_us == 0) return;
  const std::uint32_t delay_us = injected_number(injection, task) % (2 * injection.max_delay_us);
  if (delay_us >= injection.max_delay_us) return;
  const std::uint32_t start = ptx::global_nanoseconds_low();
  while (ptx::global_nanoseconds_low() - start < 1000 * delay_us) {
  }
}

/// To be asked before a task's signals, by any threads that send some: delays them at random;
/// false where they are to be withheld. Reads the name only if something is injected.
__device__ __forceinline__ bool may_signal(const DeviceFaultInjection& injection,
                                           const TaskName& task) {
  if (injection.max_delay_us == 0 && injection.withhold_stage < 0) return true;
  random_delay(injection, task);
  return injection.withhold_stage != static_cast<int>(task.stage) ||
         injection.withhold_tile != task.tile;
}

}  // namespace uniep::cuda
