#pragma once

#include "cuda/device/fault_injection.cuh"
#include "cuda/device/poll.cuh"
#include "cuda/ptx/tma.cuh"
#include "schedule/dependencies.h"

namespace uniep::cuda {

/// The counter of this rank that a wait looks at, and where it stood when the pass began.
struct CounterAddress {
  const std::uint32_t* counter;
  std::uint32_t base;
};

__device__ __forceinline__ CounterAddress counter_of(const DeviceContext& ctx, const Wait& wait) {
  const int kind = static_cast<int>(wait.kind);
  const bool one_base = ctx.view.counter(wait.kind).of == CounterOf::kSource;
  return {ctx.counters.first[kind] + wait.index,
          ctx.counters.base[kind][one_base ? 0 : wait.index]};
}

__device__ __forceinline__ void record_failure(const DeviceContext& ctx, const Task& task,
                                               const Wait& wait, std::uint32_t seen, bool refused) {
  if (atomicCAS_system(&ctx.failure->raised, 0, -1) != 0) return;
  ctx.failure->refused = refused ? 1 : 0;
  ctx.failure->stage = static_cast<int>(task.stage);
  ctx.failure->tile = task.tile;
  ctx.failure->peer = wait.peer;
  ctx.failure->counter = static_cast<int>(wait.kind);
  ctx.failure->expected = wait.expected;
  ctx.failure->seen = seen;
  __threadfence_system();
  *static_cast<volatile int*>(&ctx.failure->raised) = 1;
  ptx::add_relaxed_gpu(ctx.failed, 1);
}

/// Waits in one thread; false when the time limit passed, here or in another wait of this rank, or
/// a rank refused the call, which ends the kernel. What the counter stands for may be read after
/// `acquire`.
__device__ __forceinline__ bool poll(const DeviceContext& ctx, const Task& task, const Wait& wait) {
  const CounterAddress at = counter_of(ctx, wait);
  std::uint32_t seen = 0;
  const auto reached = [&] {
    seen = ptx::load_relaxed_system(at.counter) - at.base;
    return static_cast<std::int32_t>(seen - wait.expected) >= 0;
  };
  const PollEnd end =
      poll_until(reached, ctx.failed, ctx.calls, ctx.limit_ticks[static_cast<int>(wait.kind)]);
  if (end == PollEnd::kReached) return true;
  if (end != PollEnd::kOthersFailed) {
    record_failure(ctx, task, wait, seen, end == PollEnd::kRefused);
  }
  return false;
}

/// Orders what was polled before all that comes after. Counters that peers advance need the wider
/// fence.
__device__ __forceinline__ void acquire(CounterKind kind) {
  if (is_symmetric(kind)) {
    ptx::fence_system();
  } else {
    __threadfence();
  }
}

__device__ __forceinline__ bool wait_for(const DeviceContext& ctx, const Task& task,
                                         const Wait& wait) {
  random_delay(ctx.fault_injection, name_of(task));
  const bool ready = poll(ctx, task, wait);
  acquire(wait.kind);
  return ready;
}

/// Waits for the inputs of one task after another, in one thread.
class Inputs {
 public:
  explicit __device__ __forceinline__ Inputs(const DeviceContext& ctx) : ctx_(ctx) {}

  /// Waits for everything that the task needs: counters of this rank, or of peers, never both. What
  /// the last task has waited for, as those of one expert often do, is not looked at again. The
  /// copy engine may then read it too. `of_expert`: the task waits for what all tasks of its stage
  /// and expert do.
  template <bool kMayHaveRing>
  __device__ __forceinline__ bool wait_for(const Task& task, bool of_expert) {
    if (of_expert && task.stage == stage_ && task.expert == expert_) {
      random_delay(ctx_.fault_injection, name_of(task));
      return true;
    }
    stage_ = task.stage;
    expert_ = task.expert;
    random_delay(ctx_.fault_injection, name_of(task));
    bool ready = true, looked = false;
    for_each_wait<kMayHaveRing>(ctx_.view, task, [&](const Wait& wait) {
      if (wait.kind == last_.kind && wait.index == last_.index && wait.expected == last_.expected) {
        return;
      }
      ready = ready && poll(ctx_, task, wait);
      looked = true;
      last_ = wait;
    });
    if (looked) {
      acquire(last_.kind);
      ptx::fence_proxy_async();
    }
    return ready;
  }

 private:
  const DeviceContext& ctx_;
  Wait last_{.kind = CounterKind::kPublished, .index = -1, .expected = 0, .peer = -1};
  Stage stage_ = Stage::kPlan;  // of the last task
  int expert_ = -1;
};

}  // namespace uniep::cuda
