#pragma once

#include "schedule/constraints.h"
#include "tune/book/cache.h"
#include "uniep/problem.h"

namespace uniep::tune {

/// The situation of a pass on this machine; on a GPU, on this thread's device. `tokens` is the most
/// that a rank holds.
TuneKey tune_key(Backend backend, const Problem& problem, int ranks, std::int64_t tokens,
                 double skew, Pass pass);

/// What this machine's devices can run.
Place this_place(Backend backend);

}  // namespace uniep::tune
