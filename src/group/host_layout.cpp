#include "group/host_layout.h"

#include <algorithm>
#include <set>

#include "base/check.h"

namespace uniep {
namespace {

RankLayout wanted_layout(int ranks, int hosts) {
  require(ranks % hosts == 0, ErrorCode::kInvalidArgument, "UNIEP_HOSTS is ", hosts,
          " in a group of ", ranks, " ranks; hosts are equal, so a divisor of ", ranks,
          " is accepted");
  return {.hosts = hosts, .local_ranks = ranks / hosts};
}

RankLayout found_layout(const std::vector<std::string>& ids) {
  const int ranks = static_cast<int>(ids.size());
  const auto other = std::ranges::find_if(ids, [&](const auto& id) { return id != ids[0]; });
  const int local = static_cast<int>(other - ids.begin());
  const int hosts = static_cast<int>(std::set<std::string>(ids.begin(), ids.end()).size());
  bool equal = local * hosts == ranks;
  for (int r = 0; equal && r < ranks; ++r) {
    equal = ids[static_cast<std::size_t>(r)] == ids[static_cast<std::size_t>(r / local * local)];
  }
  require(equal, ErrorCode::kInvalidArgument, "the group's ", ranks, " ranks are on ", hosts,
          " hosts, and the first of them has ranks 0 to ", local - 1,
          "; as many consecutive ranks on every host are accepted");
  return {.hosts = hosts, .local_ranks = local};
}

}  // namespace

RankLayout layout_of_group(const std::vector<std::string>& ids,
                           const std::vector<std::int32_t>& wanted) {
  for (std::size_t r = 1; r < wanted.size(); ++r) {
    require(wanted[r] == wanted[0], ErrorCode::kInvalidArgument, "UNIEP_HOSTS is ", wanted[0],
            " on rank 0 and ", wanted[r], " on rank ", r,
            "; the same on all ranks of a group is accepted (0: not set)");
  }
  return wanted[0] > 0 ? wanted_layout(static_cast<int>(ids.size()), wanted[0]) : found_layout(ids);
}

}  // namespace uniep
