#pragma once

#include <functional>
#include <string>

#include "bench/bench_device.h"
#include "commands.h"
#include "common/ranks.h"
#include "uniep/communicator.h"

// Ranks with the devices on which bench, tune and profile measure.

namespace uniep::tool {

/// The ranks of a backend. Of several processes only one `speaks`: prints and writes files.
struct Ranks {
  int count = 1;
  int hosts = 1;  ///< that they are on
  bool speaks = true;
  Backend backend = Backend::kCpu;
  std::string machine;
  std::string sharing{};  ///< `sharing_text` of them
  std::string no_floor;   ///< why its devices have no bare GEMMs to compare with; empty: they have
  /// Runs a body as every rank of this process.
  std::function<void(const std::function<void(Communicator&, BenchDevice&)>&)> run;
};

/// Ranks that a command line asks for.
struct RanksWanted {
  Backend backend = Backend::kCpu;
  int count = 0;  ///< 0: the default, 2 ranks or every GPU
  int hosts = 0;  ///< 0: not given, one
};

inline std::string ranks_text(const Ranks& ranks) { return ranks_text(ranks.count, ranks.hosts); }

/// What is emulated between ranks, for reports: with several hosts, the network too. Empty:
/// nothing.
std::string link_text_of(const Ranks& ranks);

/// Calls `body` with the ranks that this process has a part in, and returns its exit code. With
/// CUDA this process is one rank, or starts them all and waits; `refuse` is called with their
/// number before that, for what can be refused once and not by every rank. CPU ranks are threads:
/// throws where a launcher has started several processes, which would all do the same.
int with_ranks(const RanksWanted& wanted, const Invocation& invocation,
               const std::function<void(int)>& refuse,
               const std::function<int(const Ranks&)>& body);

// `command`, whose purpose are times, refuses ranks that share GPUs: before ranks are started,
// which says it once; and where a launcher has started them.
void refuse_sharing(const std::string& command, Backend backend, int ranks);
void refuse_sharing(const std::string& command, const Ranks& ranks);

}  // namespace uniep::tool
