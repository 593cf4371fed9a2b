#pragma once

#include <functional>
#include <string>

#include "bench/bench_device.h"
#include "commands.h"
#include "uniep/communicator.h"

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

/// Throws where --ranks is given, not 0, and a launcher has started another number of processes.
void require_ranks_of_launcher(int given);

/// Throws where the backend has no ranks on so many hosts.
void require_hosts(Backend backend, int hosts);

/// "4", "4 on 2 hosts": for reports.
std::string ranks_text(int ranks, int hosts);
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

inline constexpr int kDefaultCpuRanks = 2;

/// Throws where so many ranks cannot have their GPUs here.
void require_gpus(int ranks);

/// "4 ranks on 1 GPU (UNIEP_SHARE_DEVICE): times mean nothing"; empty where each has its own.
std::string sharing_text(int ranks, int gpus);
std::string sharing_of(const Communicator& member);

/// "2 x NVIDIA H200 (...)", and where ranks share them how many do: the GPUs of a group of
/// processes that this one belongs to.
std::string gpus_text(const Communicator& member);

// `command`, whose purpose are times, refuses ranks that share GPUs: before ranks are started,
// which says it once; and where a launcher has started them.
void refuse_sharing(const std::string& command, Backend backend, int ranks);
void refuse_sharing(const std::string& command, const Ranks& ranks);

}  // namespace uniep::tool
