#include "plan/routing_fault.h"

#include "base/check.h"

namespace uniep {

void throw_if_any(const RoutingFault& f, const Problem& p, int num_ranks) {
  switch (f.kind) {
    case RoutingFault::Kind::kNone:
      return;
    case RoutingFault::Kind::kTokens:
      throw Error(ErrorCode::kInvalidArgument,
                  cat("rank ", f.rank, " holds ", f.value,
                      " tokens; 0 to max_tokens=", p.max_tokens, " is accepted"));
    case RoutingFault::Kind::kExpertId:
      throw Error(ErrorCode::kInvalidArgument,
                  cat("topk_ids of rank ", f.rank, ", token ", f.token, ", slot ", f.slot, " is ",
                      f.value, "; -1 (dropped) to ", p.num_experts - 1, " is accepted"));
    case RoutingFault::Kind::kCapacity:
      throw Error(ErrorCode::kCapacity, cat("rank ", f.rank, " would receive ", f.value,
                                            " rows (padding included), but capacity_rows is ",
                                            capacity_rows(p, num_ranks), "; capacity_rows=",
                                            f.value, " would do for this routing"));
  }
}

}  // namespace uniep
