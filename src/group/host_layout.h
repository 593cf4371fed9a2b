#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "uniep/rank_layout.h"

namespace uniep {

/// On which hosts a group's ranks are. `ids` names the host of each rank, `wanted` is UNIEP_HOSTS
/// of each (0: not set), which goes before. Throws Error(kInvalidArgument) where hosts do not have
/// as many consecutive ranks each, or ranks want different things.
RankLayout layout_of_group(const std::vector<std::string>& ids,
                           const std::vector<std::int32_t>& wanted);

}  // namespace uniep
