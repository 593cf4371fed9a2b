#include "group/host_layout.h"

#include <algorithm>
#include <fstream>
#include <set>

#include "base/check.h"
#include "base/env.h"

namespace uniep {
namespace {

RankLayout wanted_layout(int ranks, int hosts) {
  require(ranks % hosts == 0, ErrorCode::kInvalidArgument, "UNIEP_HOSTS is ", hosts,
          " in a group of ", ranks, " ranks; hosts are equal, so a divisor of ", ranks,
          " is accepted");
  return {.hosts = hosts, .local_ranks = ranks / hosts};
}

/// Hosts as runs of ranks: how many ranks each has, in order. A host that has several runs comes
/// once for each.
std::vector<int> runs_of(const std::vector<std::string>& ids) {
  std::vector<int> runs;
  for (std::size_t r = 0; r < ids.size(); ++r) {
    if (r == 0 || ids[r] != ids[r - 1]) runs.push_back(0);
    ++runs.back();
  }
  return runs;
}

/// Whether the host of rank r has had ranks before, but not the one just before.
bool comes_back(const std::vector<std::string>& ids, std::size_t r) {
  const auto here = ids.begin() + static_cast<std::ptrdiff_t>(r);
  return ids[r] != ids[r - 1] && std::find(ids.begin(), here, ids[r]) != here;
}

RankLayout found_layout(const std::vector<std::string>& ids) {
  const std::vector<int> runs = runs_of(ids);
  const std::set<std::string> hosts(ids.begin(), ids.end());
  if (runs.size() > hosts.size()) {
    std::size_t r = 1;
    while (!comes_back(ids, r)) ++r;
    const auto earlier = std::ranges::find(ids, ids[r]) - ids.begin();
    throw Error(
        ErrorCode::kInvalidArgument,
        cat("ranks ", earlier, " and ", r, " of the group are on one host, and rank ", r - 1,
            " is on another; the ranks of each host one after another are accepted"));
  }
  for (std::size_t host = 1; host < runs.size(); ++host) {
    require(runs[host] == runs[0], ErrorCode::kInvalidArgument, "the group has ", runs[0],
            " ranks on its first host and ", runs[host], " on host ", host,
            "; as many on every host are accepted");
  }
  return {.hosts = static_cast<int>(runs.size()), .local_ranks = runs[0]};
}

}  // namespace

std::string host_id() {
  const std::string given = env_host_id();
  if (!given.empty()) return given;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

bool are_several(const std::vector<std::string>& ids) {
  return std::ranges::any_of(ids, [&](const std::string& id) { return id != ids[0]; });
}

int ranks_beside(const std::vector<std::string>& ids, int rank) {
  return static_cast<int>(std::ranges::count(ids, ids[static_cast<std::size_t>(rank)]));
}

RankLayout layout_of_group(const std::vector<std::string>& ids,
                           const std::vector<std::int32_t>& wanted) {
  for (std::size_t r = 1; r < wanted.size(); ++r) {
    require(wanted[r] == wanted[0], ErrorCode::kInvalidArgument, "UNIEP_HOSTS is ", wanted[0],
            " on rank 0 and ", wanted[r], " on rank ", r,
            "; the same on all ranks of a group is accepted (0: not set)");
  }
  return wanted[0] > 0 ? wanted_layout(static_cast<int>(ids.size()), wanted[0]) : found_layout(ids);
}

void require_backend_of(const RankLayout& layout, Backend backend) {
  require(backend == Backend::kCpu || layout.hosts == 1, ErrorCode::kUnsupported,
          "the group's ranks are on ", layout.hosts,
          " hosts; the CUDA backend accepts one host (and UNIEP_HOSTS=1, or not set)");
}

}  // namespace uniep
