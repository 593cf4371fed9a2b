#pragma once

#include <cstdint>

#include "uniep/problem.h"
#include "uniep/schedule.h"
#include "uniep/stage.h"

namespace uniep {

/// Tokens rounded up to a power of two: numbers that round to the same one share the sizes below,
/// and what is tuned.
std::int64_t token_bucket(std::int64_t tokens);

/// `schedule` with the sizes that it leaves open, as they are for this problem. `pull_tokens=0` is
/// a 1024th and `token_block=0` a 128th of the bucket of `max_tokens`; at least 1,
/// at most 8 and 32. So a GPU's warps all have tokens to pull, and its SMs tokens to sum, however
/// few there are, and all ranks agree, however many each has (docs/performance.md, "Few tokens").
/// Where dispatch has a launch of its own, and with it all warps, `pull_tokens=0` is at most 2:
/// tasks must be small to divide evenly among so many. `wgrad_run=0` is 8, or fewer where all dw2
/// together have less than 1024 tiles, so that workers all have some.
Schedule with_sizes(const Schedule& schedule, const Problem& problem);

/// What a pass of this problem runs under if it is given `schedule`: with_sizes. Where experts take
/// turns in a ring of rows (Problem::backward_rows), backward has in_ring of it: the only values of
/// some axes with which an expert's rows come and go on their own. These are launch=single,
/// waves=1, wgrad=interleaved, dispatch_wire=rows (a token's rows are of several experts),
/// expert_order=index and head_start=0; one worker at least does not dispatch, and one does where
/// all did (launch=separate).
Schedule in_ring(Schedule schedule);
/// The schedule for tokens that come in waves (Problem::first_host): launch=waves, with a launch
/// for each.
Schedule in_token_waves(Schedule schedule, const Problem& problem, Pass pass);
/// Either of these, if the pass has no choice.
Schedule with_forced_axes(const Schedule& schedule, const Problem& problem, Pass pass);
Schedule schedule_of_pass(const Schedule& schedule, const Problem& problem, Pass pass);

}  // namespace uniep
