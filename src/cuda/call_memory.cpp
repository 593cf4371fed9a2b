#include "cuda/call_memory.h"

#include <vector>

#include "layer/callers_memory.h"

namespace uniep::cuda {

CallMemory::StepBytes CallMemory::step_bytes(const Problem& p, int num_ranks) {
  const std::int64_t rows = capacity_rows(p, num_ranks);
  return {.plan = DevicePlanLayout(p, num_ranks).bytes,
          .saved = saved_layout(p, num_ranks).bytes,
          .forward_memory = RowLayout(p, rows, Pass::kForward).bytes,
          .backward_memory = RowLayout(p, rows, Pass::kBackward).bytes,
          .order = most_order_bytes(p, num_ranks)};
}

SavedLayout CallMemory::saved_layout(const Problem& p, int num_ranks) {
  const std::int64_t rows = capacity_rows(p, num_ranks);
  return {p, rows, most_received(p, num_ranks, rows)};
}

CallMemory::CallMemory(const Problem& problem, int num_ranks, std::byte* workspace)
    : bytes_(step_bytes(problem, num_ranks)),
      plan_scratch_(problem, num_ranks),
      workspace_(problem, num_ranks, workspace) {}

/// Two plans: `last_pass` asks for the last one's traffic.
void CallMemory::reserve_step(bool row_pool) {
  if (workspace_.is_callers()) return;
  std::vector<std::shared_ptr<std::byte>> together;
  for (const std::int64_t bytes : {bytes_.plan, bytes_.plan, row_pool ? 0 : bytes_.saved,
                                   bytes_.forward_memory, bytes_.backward_memory, bytes_.order}) {
    if (bytes == 0) continue;
    together.push_back(take(nullptr, bytes, BufferPool::Use::kHeld, false));
  }
}

PlanScratch CallMemory::plan_scratch() const {
  return cuda::plan_scratch(workspace_.plan_scratch(), plan_scratch_);
}

std::shared_ptr<std::byte> CallMemory::plan(std::span<std::byte> given, bool captured) {
  return take(given.data(), bytes_.plan, BufferPool::Use::kHeld, captured);
}

std::shared_ptr<std::byte> CallMemory::saved(bool captured) {
  return take(nullptr, bytes_.saved, BufferPool::Use::kHeld, captured);
}

std::shared_ptr<std::byte> CallMemory::backward_memory(std::span<std::byte> given, bool captured) {
  return take(given.data(), bytes_.backward_memory, BufferPool::Use::kHeld, captured);
}

std::shared_ptr<std::byte> CallMemory::order(bool captured) {
  return take(workspace_.order(), bytes_.order, BufferPool::Use::kCall, captured);
}

std::shared_ptr<std::byte> CallMemory::rows(Pass pass, std::span<std::byte> given, bool captured) {
  const std::int64_t bytes =
      pass == Pass::kForward ? bytes_.forward_memory : bytes_.backward_memory;
  return take(given.data(), bytes, BufferPool::Use::kCall, captured);
}

/// `given`: the caller's, or null.
std::shared_ptr<std::byte> CallMemory::take(std::byte* given, std::int64_t bytes,
                                            BufferPool::Use use, bool captured) {
  if (given != nullptr) return callers_memory(given);
  return pool_.take(bytes, use, captured);
}

}  // namespace uniep::cuda
