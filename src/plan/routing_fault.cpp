#include "plan/routing_fault.h"

#include "base/check.h"
#include "base/expert_numbers.h"
#include "layout/page_pool.h"

namespace uniep {

std::int64_t pool_bytes_that_would_do(const RoutingFault& fault, const Problem& problem) {
  return bytes_for_pages(page_bytes(problem), fault.held + fault.value);
}

namespace {

std::string expert_name(std::int32_t number, const Problem& p, int num_ranks) {
  const ExpertNumbers numbers = expert_numbers(p, num_ranks);
  return cat(numbers.is_shared(number) ? "shared expert " : "expert ", numbers.index(number));
}

}  // namespace

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
    case RoutingFault::Kind::kExpertRows:
      throw Error(ErrorCode::kCapacity,
                  cat(expert_name(f.slot, p, num_ranks), " of rank ", f.rank, " would receive ",
                      f.value, " rows (padding included), but backward_rows is ", p.backward_rows,
                      "; backward_rows=", f.value, " or more would do for this routing, or 0"));
    case RoutingFault::Kind::kPages:
      throw Error(ErrorCode::kCapacity,
                  cat("rank ", f.rank, " would save ", f.value, " pages, but ", f.held, " of the ",
                      f.pool, " pages of its row pool are held by other plans; ",
                      pool_bytes_that_would_do(f, p), " bytes (", f.held + f.value,
                      " pages) would do for this routing, or backward passes ahead of it"));
  }
}

}  // namespace uniep
