#pragma once

#include "comm/wait_error.h"
#include "cuda/device/context.cuh"
#include "schedule/dependencies.h"

namespace uniep::cuda {

/// The error of a wait that expired in a pass's kernel.
inline Error pass_wait_error(const WaitFailure& w, int rank, std::int64_t limit_ms) {
  return wait_error({.rank = rank,
                     .stage = name(static_cast<Stage>(w.stage)),
                     .tile = w.tile,
                     .peer = w.peer,
                     .expected = w.expected,
                     .seen = w.seen,
                     .limit_ms = limit_ms},
                    name(static_cast<CounterKind>(w.counter)));
}

}  // namespace uniep::cuda
