#pragma once

#include "base/contract.h"
#include "cpu/pass_context.h"

namespace uniep::cpu {

/// What the experts have made of one token, on its rank or a relay of it.
struct TokenRows {
  const std::int32_t* ids = nullptr;  // [K]
  const bf16* rows = nullptr;         // [K, H]
  const float* probs = nullptr;       // [K], where rows are multiplied by them; else null
};

/// The rows of a token of this rank, or of a rank that this one stands in for.
TokenRows token_rows(const PassContext& ctx, int source, std::int64_t token);

/// The rows of these experts added up, k ascending.
void add_rows(const PassContext& ctx, const TokenRows& token, ExpertRange experts, float* sum);

/// Whether the token's experts of a group are on this host.
inline bool is_here(const PassView& v, ExpertRange group) {
  return v.is_here(v.rank_of_expert(group.begin));
}

/// The first slot of a token with an expert of the group: it has the group's sum.
inline int first_slot(const std::int32_t* ids, ExpertRange group) {
  int k = 0;
  while (!group.has(ids[k])) ++k;
  return k;
}

}  // namespace uniep::cpu
