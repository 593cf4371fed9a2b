#include "uniep/rank_layout.h"

#include "base/check.h"

namespace uniep {

RankLayout layout_of_hosts(int ranks, int hosts) {
  require(hosts >= 1 && ranks >= 1 && ranks % hosts == 0, ErrorCode::kInvalidArgument,
          "number of hosts is ", hosts, " of ", ranks,
          " ranks; hosts are equal, so a divisor of the number of ranks from 1 on is accepted");
  return {.hosts = hosts, .local_ranks = ranks / hosts};
}

}  // namespace uniep
