#include "reference/plan.h"

#include "base/check.h"

namespace uniep::reference {

std::vector<std::vector<Row>> expert_rows(std::span<const std::int32_t> topk_ids, int num_experts,
                                          int topk) {
  std::vector<std::vector<Row>> rows(static_cast<std::size_t>(num_experts));
  for (std::size_t i = 0; i < topk_ids.size(); ++i) {
    const std::int32_t id = topk_ids[i];
    const auto slot = static_cast<std::int64_t>(i);
    require(id >= -1 && id < num_experts, ErrorCode::kInvalidArgument, "topk_ids[", slot / topk,
            ", ", slot % topk, "] is ", id, "; -1 (dropped) to ", num_experts - 1, " are accepted");
    if (id >= 0) rows[static_cast<std::size_t>(id)].push_back({slot / topk, slot});
  }
  return rows;
}

}  // namespace uniep::reference
