#pragma once

#include <cstdint>

#include "cuda/device/refusal.cuh"
#include "cuda/ptx/sync.cuh"

namespace uniep::cuda {

/// How a wait came to its end.
enum class PollEnd { kReached, kOthersFailed, kRefused, kExpired };

/// The loop of every wait, in one thread: until reached(), or `failed` says that another wait of
/// this rank has expired, or a rank has refused the call, or `limit_ticks` have passed.
template <class Reached>
__device__ __forceinline__ PollEnd poll_until(Reached&& reached, const std::uint32_t* failed,
                                              const CallState* calls, std::uint32_t limit_ticks) {
  if (reached()) return PollEnd::kReached;
  const std::uint32_t start = ptx::global_ticks();
  for (unsigned spins = 1; !reached(); ++spins) {
    if (spins % 128 != 0) continue;
    // The record of a failure is in host memory: reading that as often, in every SM, slows down all
    // traffic over NVLink and PCIe by an order of magnitude.
    if (ptx::load_relaxed_gpu(failed) != 0) return PollEnd::kOthersFailed;
    if (is_refused(calls)) return PollEnd::kRefused;
    if (ptx::global_ticks() - start > limit_ticks) return PollEnd::kExpired;
  }
  return PollEnd::kReached;
}

}  // namespace uniep::cuda
