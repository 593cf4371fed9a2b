#pragma once

#include <cstdint>

namespace uniep::cuda {

/// A slot in every rank's symmetric memory, in which a rank that cannot begin a call (it refuses
/// its arguments, or finds no memory) says so to the others: their waits for it end at once instead
/// of at the time limit. Zeroed once. The first rank to come keeps the slot.
struct Refusal {
  std::uint32_t call = 0;     // number of the call, from 1, written last; 0: nobody refused
  std::uint32_t claimed = 0;  // 0 or 1
  std::int32_t code = 0;      // ErrorCode
  char sentence[244] = {};    // ends with a zero
};

}  // namespace uniep::cuda
