#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "uniep/backend.h"
#include "uniep/rank_layout.h"

namespace uniep {

/// UNIEP_HOST_ID; else what is the same in all containers of a host, and different on any two
/// hosts.
std::string host_id();

/// Whether ranks are on several hosts, whatever UNIEP_HOSTS says.
bool are_several(const std::vector<std::string>& ids);

/// How many ranks are where `rank` is, itself included, whatever UNIEP_HOSTS says.
int ranks_beside(const std::vector<std::string>& ids, int rank);

/// The hosts that a group's ranks are on. `ids` names the host of each rank, `wanted` is
/// UNIEP_HOSTS of each (0: not set), which goes before. Throws Error(kInvalidArgument) if hosts do
/// not have as many consecutive ranks each, or ranks want different things.
RankLayout layout_of_group(const std::vector<std::string>& ids,
                           const std::vector<std::int32_t>& wanted);

/// Throws Error(kUnsupported) where a backend does not run on so many hosts.
void require_backend_of(const RankLayout& layout, Backend backend);

}  // namespace uniep
