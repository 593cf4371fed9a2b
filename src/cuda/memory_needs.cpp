#include "cuda/memory_needs.h"

#include "base/check.h"
#include "cuda/layer_memory.h"
#include "layer/memory_arguments.h"

namespace uniep::cuda {

MemoryNeeds memory_needs(const Problem& p, int num_ranks, std::optional<std::int64_t> wanted_rows) {
  const auto reason = unsupported_reason(p, num_ranks);
  require(!reason, ErrorCode::kUnsupported, reason.value_or(""));
  const std::int64_t rows = checked_rows(p, num_ranks, wanted_rows);
  return {.rows = rows,
          .rows_of_x = rows_of_x(p, num_ranks, rows),
          .symmetric = LayerSymmetricLayout(p, num_ranks).bytes,
          .workspace = LayerWorkspaceLayout(p, num_ranks).bytes,
          .plan = DevicePlanLayout(p, num_ranks).bytes,
          .forward_memory = RowLayout(p, rows, Pass::kForward).bytes,
          .backward_memory = RowLayout(p, rows, Pass::kBackward).bytes,
          .alignment = kDeviceAlignment};
}

}  // namespace uniep::cuda
