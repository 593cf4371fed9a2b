#pragma once

namespace uniep {

/// Ranks of a group, over all of its hosts.
inline constexpr int kMaxGroupRanks = 64;
/// Ranks that reach one another's GPU memory by pointer: the GPUs of one host.
inline constexpr int kMaxCudaRanks = 8;
/// Ranks of a made-up layer, whose routing the simulator and tests read.
inline constexpr int kMaxMadeUpRanks = 1024;

}  // namespace uniep
