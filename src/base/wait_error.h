#pragma once

#include <string>

#include "base/check.h"
#include "uniep/error.h"

namespace uniep {

/// The error of an expired wait; `what` says what was counted, `hint` what may be the cause.
inline Error wait_error(const WaitReport& w, const std::string& what,
                        const std::string& hint = "") {
  const std::string tile = w.tile < 0 ? "" : cat(", tile ", w.tile);
  const std::string peer = w.peer < 0 ? "" : cat(", peer ", w.peer);
  return Error(w, cat("rank ", w.rank, ": wait expired after ", w.limit_ms,
                      " ms (timeout_ms or UNIEP_TIMEOUT_MS)", " in stage ", w.stage, tile, peer,
                      ": expected ", w.expected, " ", what, ", seen ", w.seen,
                      hint.empty() ? "" : "; ", hint));
}

}  // namespace uniep
