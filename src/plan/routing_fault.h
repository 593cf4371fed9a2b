#pragma once

#include <cstdint>

#include "uniep/bf16.h"
#include "uniep/overflow.h"
#include "uniep/problem.h"

namespace uniep {

/// Why a routing has no plan. Found by RoutingPlan::build on the CPU and by the plan kernel on a
/// GPU, in the same order: the first rank with an impossible number of tokens; else the first slot
/// (by rank, token, k) with an impossible id; else the rank with the most rows, where they are too
/// many; else the expert with the most rows, where backward has no room for these (backward_rows);
/// else the rank whose row pool lacks most pages.
struct RoutingFault {
  enum class Kind : std::int32_t { kNone, kTokens, kExpertId, kCapacity, kPages, kExpertRows };

  Kind kind = Kind::kNone;
  std::int32_t rank = -1;   ///< whose tokens or ids; kCapacity, kExpertRows, kPages: that would
                            ///< receive or lack most
  std::int64_t token = -1;  ///< kExpertId only
  std::int32_t slot = -1;   ///< kExpertId; kExpertRows: the expert's number (ExpertNumbers)
  std::int64_t value = 0;   ///< tokens, expert id, rows needed, or pages needed
  std::int64_t held = 0;    ///< kPages only: pages of its pool that other plans hold
  std::int64_t pool = 0;    ///< kPages only: of so many

  friend bool operator==(const RoutingFault&, const RoutingFault&) = default;
};

/// Element 0 of CallOptions::overflow.
UNIEP_HD constexpr Overflow overflow_of(const RoutingFault& fault) {
  switch (fault.kind) {
    case RoutingFault::Kind::kNone:
      return Overflow::kNone;
    case RoutingFault::Kind::kCapacity:
      return Overflow::kRows;
    case RoutingFault::Kind::kPages:
      return Overflow::kPages;
    case RoutingFault::Kind::kExpertRows:
      return Overflow::kExpertRows;
    case RoutingFault::Kind::kTokens:
    case RoutingFault::Kind::kExpertId:
      break;
  }
  return Overflow::kImpossible;
}
inline constexpr bf16 kFaultToken{0x7fc0};  // out and dx of a routing with a fault: NaN

/// How large the row pool of the rank of a kPages fault would have to be.
std::int64_t pool_bytes_that_would_do(const RoutingFault& fault, const Problem& problem);

/// Throws the Error that describes the fault; does nothing where there is none.
void throw_if_any(const RoutingFault& fault, const Problem& problem, int num_ranks);

}  // namespace uniep
