#pragma once

#include <cstdint>
#include <vector>

#include "schedule/constraints.h"
#include "tune/book/cache.h"
#include "tune/model/machine_profile.h"
#include "uniep/problem.h"

namespace uniep::tune {

/// The model's pick for a situation among the default, the presets, the default's neighbours and
/// defaults with more workers that dispatch, with a routing made up for the key's skew.
Schedule quick_pick(const Problem& problem, const TuneKey& key, const Place& place,
                    const MachineProfile& profile);

/// topk_ids of all ranks, `tokens` each: experts drawn without repetition (where there are as many
/// as topk), expert e with a weight that falls as (1 + e)^-skew. Where tokens of several hosts are
/// gathered, of the experts of them all; slots that are not of the first host's are dropped.
std::vector<std::int32_t> sampled_routing(const Problem& problem, int ranks, std::int64_t tokens,
                                          double skew, std::uint64_t seed);

}  // namespace uniep::tune
