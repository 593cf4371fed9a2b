#include "cuda/pass_memory.h"

#include <algorithm>

namespace uniep::cuda {
namespace {

std::uint32_t* words(std::byte* base, std::int64_t offset) {
  return reinterpret_cast<std::uint32_t*>(base + offset);
}

}  // namespace

DeviceContext device_context(const Problem& problem, const PassView& view, const PassMemory& memory,
                             std::uint32_t passes, std::uint64_t limit_ns) {
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
                  .published_base = passes - 1};
  ctx.failure = memory.failure;
  ctx.failed = words(memory.scratch, bases.failed);
  ctx.limit_ns = limit_ns;
  ctx.trace = memory.trace;
  return ctx;
}

EnterArgs enter_args(const Problem& problem, int num_ranks, const PassMemory& memory,
                     const bf16* tokens, const float* probs) {
  const PassScratchLayout bases(problem, num_ranks);
  return {.tokens = tokens,
          .probs = probs,
          .rows_ready_base = words(memory.scratch, bases.rows_ready),
          .tile_done_base = words(memory.scratch, bases.tile_done),
          .expert_done_base = words(memory.scratch, bases.expert_done),
          .arrived_base = words(memory.scratch, bases.arrived),
          .tickets = words(memory.scratch, bases.tickets),
          .ctas_done = words(memory.scratch, bases.ctas_done)};
}

}  // namespace uniep::cuda
