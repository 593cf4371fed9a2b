#pragma once

#include <cstdint>

namespace uniep::cuda {

/// The place where a rank that cannot begin a call (it refuses its arguments, or finds no memory)
/// says so to the others: their waits for it end at once instead of at the time limit. The first
/// rank to come keeps it.
struct Refusal {
  std::uint32_t call = 0;     // number of the call, from 1, written last; 0: nobody refused
  std::uint32_t claimed = 0;  // 0 or 1
  std::int32_t code = 0;      // ErrorCode
  char sentence[756] = {};    // ends with a zero
};

/// What every rank keeps of its layer's calls in symmetric memory; zeroed once. Calls are plans,
/// and passes of plans that can be used. Their kernels count them, since a CUDA graph repeats them
/// without the host: alike on all ranks.
struct CallState {
  std::uint32_t begun = 0;  // by this rank, the one at hand included
  Refusal refusal;          // by any rank
};

}  // namespace uniep::cuda
