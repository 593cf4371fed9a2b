#pragma once

#include <functional>
#include <string>

#include "bench_device.h"
#include "commands.h"
#include "uniep/communicator.h"

namespace uniep::tool {

/// The ranks of a backend. Of several processes only one `speaks`: prints and writes files.
struct Ranks {
  int count = 1;
  bool speaks = true;
  Backend backend = Backend::kCpu;
  std::string machine;
  std::string no_floor;  ///< why its devices have no bare GEMMs to compare with; empty: they have
  /// Runs a body as every rank of this process.
  std::function<void(const std::function<void(Communicator&, BenchDevice&)>&)> run;
};

/// Calls `body` with the ranks that this process has a part in, and returns its exit code. With
/// CUDA this process is one rank, or starts them all and waits; `refuse` is called with their
/// number before that, for what can be refused once and not by every rank. `count` 0: the default,
/// 2 ranks or every GPU.
int with_ranks(Backend backend, int count, const Invocation& invocation,
               const std::function<void(int)>& refuse,
               const std::function<int(const Ranks&)>& body);

inline constexpr int kDefaultCpuRanks = 2;

}  // namespace uniep::tool
