#pragma once

#include <cstdint>
#include <limits>

namespace uniep {

// What `validate` accepts of a Problem (kMaxTopk is public), for those who check a layer before
// there is one: layer files and made-up layers. The bytes of every tensor fit 63 bits.

inline constexpr std::int64_t kMaxWidth = std::int64_t{1} << 20;       ///< of H and I
inline constexpr std::int64_t kWidthMultiple = 8;                      ///< of H and I
inline constexpr std::int64_t kMaxNumExperts = 65536;                  ///< of E
inline constexpr std::int64_t kMaxRankTokens = std::int64_t{1} << 26;  ///< of a rank
inline constexpr int kMaxGatheredHosts = 4096;
inline constexpr int kMaxHostsInWaves = 14;  ///< a wave of tokens each, and two more
/// Row numbers are 32 bits wide.
inline constexpr std::int64_t kMaxCapacityRows = std::numeric_limits<std::int32_t>::max();

}  // namespace uniep
