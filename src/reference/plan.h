#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace uniep::reference {

/// One copy of a token, in the segment of its expert.
struct Row {
  std::int64_t token;
  std::int64_t slot;  // token * K + k
};

/// The rows of every expert in canonical order: (token, k) ascending in global order, which is the
/// order of a stable sort by expert. Dropped slots (-1) have no row. Throws Error(kInvalidArgument)
/// for an id that names no expert.
std::vector<std::vector<Row>> expert_rows(std::span<const std::int32_t> topk_ids, int num_experts,
                                          int topk);

}  // namespace uniep::reference
