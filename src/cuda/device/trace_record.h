#pragma once

#include <cstdint>

#include "uniep/stage.h"

namespace uniep::cuda {

/// One task as a CTA ran it. Times are nanoseconds of the GPU's global timer. Each field is written
/// by the one role that knows it.
struct TraceRecord {
  Stage stage;
  std::int32_t expert;  // local, or -1
  std::int64_t tile;
  std::int32_t launch;
  std::uint64_t taken;  // from the queue, by the scheduler
  std::uint64_t ready;  // its inputs were
  std::uint64_t begun;  // by the first consumer
  std::uint64_t done;
  std::uint64_t sent;  // by the first sender: stored, and signalled or about to be
  std::uint64_t
      begun_cycle;  // of the SM's clock, when `begun` and `done` were noted; 0 in dispatch
  std::uint64_t done_cycle;
};

}  // namespace uniep::cuda
