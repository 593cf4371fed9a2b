#include "cuda/pass_memory.h"

#include <algorithm>
#include <limits>

#include "base/env.h"

namespace uniep::cuda {
namespace {

std::uint32_t* words(std::byte* base, std::int64_t offset) {
  return reinterpret_cast<std::uint32_t*>(base + offset);
}

/// What is missing early in a pass holds up all that comes later, in launches that hold several
/// stages at the same time. So later waits last longer, by up to a quarter: the one that expires
/// and is reported is the one that names the cause.
constexpr std::int64_t wait_ticks(std::int64_t limit_ms, int kind) {
  const std::int64_t ticks = limit_ms * 1'000'000 / 1024;
  return ticks + ticks / (4 * (kNumCounterKinds - 1)) * kind;
}
static_assert(wait_ticks(kLongestWaitMs, kNumCounterKinds - 1) <=
              std::numeric_limits<std::uint32_t>::max());

}  // namespace

DeviceContext device_context(const Problem& problem, const PassView& view, const PassMemory& memory,
                             int limit_ms, const DeviceFaultInjection& injection, CudaErf erf) {
  const LocalCounterLayout local(problem, view.num_ranks);
  const PassScratchLayout scratch(problem, view.num_ranks);
  DeviceContext ctx{.view = view,
                    .symmetric = SymmetricLayout(problem, view.num_ranks),
                    .limits = limits_of(view.activation),
                    .erf = coefficients_of(erf)};
  std::ranges::copy(memory.heaps, ctx.heaps);
  for (int i = 0; i < kNumCounterKinds; ++i) {
    const auto kind = static_cast<CounterKind>(i);
    ctx.counters.first[i] = is_symmetric(kind) ? words(memory.heaps[view.rank], ctx.symmetric[kind])
                                               : words(memory.counters, local[kind]);
    ctx.counters.base[i] = words(memory.scratch, scratch.bases[i]);
    ctx.limit_ticks[i] = static_cast<std::uint32_t>(wait_ticks(limit_ms, i));
  }
  ctx.failure = memory.failure;
  ctx.failed = words(memory.scratch, scratch.failed);
  ctx.calls = memory.calls;
  ctx.fault_injection = injection;
  ctx.fault_injection.pass = ctx.counters.base[static_cast<int>(CounterKind::kPublished)];
  ctx.trace = memory.trace;
  return ctx;
}

CUtensorMap* expert_maps(const Problem& problem, int num_ranks, const PassMemory& memory) {
  const PassScratchLayout scratch(problem, num_ranks);
  return reinterpret_cast<CUtensorMap*>(memory.scratch + scratch.expert_maps);
}

EnterArgs enter_args(const Problem& problem, int num_ranks, const PassMemory& memory,
                     const PlanStatus* plan) {
  const PassScratchLayout scratch(problem, num_ranks);
  return {.plan = plan,
          .drawn = words(memory.scratch, scratch.drawn),
          .ctas_done = words(memory.scratch, scratch.ctas_done),
          .fill = {}};
}

}  // namespace uniep::cuda
