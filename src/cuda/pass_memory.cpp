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
  return ticks + ticks / 16 * kind;
}
static_assert(wait_ticks(kLongestWaitMs, kNumCounterKinds - 1) <=
              std::numeric_limits<std::uint32_t>::max());

}  // namespace

DeviceContext device_context(const Problem& problem, const PassView& view, const PassMemory& memory,
                             const PassCall& call) {
  const LocalCounterLayout counters(problem, view.num_ranks);
  const PassScratchLayout bases(problem, view.num_ranks);
  DeviceContext ctx{.view = view, .symmetric = SymmetricLayout(problem, view.num_ranks)};
  std::ranges::copy(memory.heaps, ctx.heaps);
  ctx.counters = {.rows_ready = words(memory.counters, counters.rows_ready),
                  .tile_done = words(memory.counters, counters.tile_done),
                  .expert_done = words(memory.counters, counters.expert_done),
                  .rows_ready_base = words(memory.scratch, bases.rows_ready),
                  .tile_done_base = words(memory.scratch, bases.tile_done),
                  .expert_done_base = words(memory.scratch, bases.expert_done),
                  .arrived_base = words(memory.scratch, bases.arrived),
                  .published_base = words(memory.scratch, bases.published)};
  ctx.failure = memory.failure;
  ctx.failed = words(memory.scratch, bases.failed);
  for (int kind = 0; kind < kNumCounterKinds; ++kind) {
    ctx.limit_ticks[kind] = static_cast<std::uint32_t>(wait_ticks(call.limit_ms, kind));
  }
  ctx.calls = memory.calls;
  ctx.faults = call.faults;
  ctx.faults.pass = ctx.counters.published_base;
  ctx.trace = memory.trace;
  return ctx;
}

EnterArgs enter_args(const Problem& problem, int num_ranks, const PassMemory& memory,
                     const bf16* tokens, const float* probs, const PlanStatus* plan) {
  const PassScratchLayout bases(problem, num_ranks);
  return {.tokens = tokens,
          .probs = probs,
          .plan = plan,
          .rows_ready_base = words(memory.scratch, bases.rows_ready),
          .tile_done_base = words(memory.scratch, bases.tile_done),
          .expert_done_base = words(memory.scratch, bases.expert_done),
          .arrived_base = words(memory.scratch, bases.arrived),
          .published_base = words(memory.scratch, bases.published),
          .tickets = words(memory.scratch, bases.tickets),
          .ctas_done = words(memory.scratch, bases.ctas_done),
          .fill = {}};
}

}  // namespace uniep::cuda
