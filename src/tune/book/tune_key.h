#pragma once

#include <string>

#include "schedule/constraints.h"
#include "tune/book/cache.h"
#include "uniep/problem.h"
#include "uniep/rank_layout.h"

namespace uniep::tune {

/// What this thread's device is called in a key; with several hosts the network that is emulated
/// between them belongs to it.
std::string device_name(Backend backend, int hosts = 1);

/// The situation of a pass on this machine; on a GPU, on this thread's device. `tokens` is the most
/// that a rank holds.
TuneKey tune_key(Backend backend, const Problem& problem, const RankLayout& layout,
                 std::int64_t tokens, double skew, Pass pass);

/// What this machine's devices can run.
Place this_place(Backend backend);

}  // namespace uniep::tune
