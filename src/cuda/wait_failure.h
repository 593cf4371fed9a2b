#pragma once

#include "base/env.h"
#include "base/wait_error.h"
#include "cuda/device/context.cuh"
#include "schedule/dependencies.h"

namespace uniep::cuda {

/// A cause that only the caller can know of.
inline std::string hint_of(const WaitFailure& w, int rank) {
  if (w.peer < 0 || w.peer == rank || env_spare_sms() > 0) return "";
  return "collectives of NCCL that run beside passes need UNIEP_SPARE_SMS";
}

/// The error of a wait that expired in a kernel; `what` was waited for.
inline Error kernel_wait_error(const WaitFailure& w, int rank, std::int64_t limit_ms,
                               const std::string& what) {
  return wait_error({.rank = rank,
                     .stage = name(static_cast<Stage>(w.stage)),
                     .tile = w.tile,
                     .peer = w.peer,
                     .expected = w.expected,
                     .seen = w.seen,
                     .limit_ms = limit_ms},
                    what, hint_of(w, rank));
}

/// The error of a pass, which waits for counters.
inline Error pass_wait_error(const WaitFailure& w, int rank, std::int64_t limit_ms) {
  return kernel_wait_error(w, rank, limit_ms, name(static_cast<CounterKind>(w.counter)));
}

}  // namespace uniep::cuda
