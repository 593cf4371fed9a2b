#pragma once

#include <string>

#include "uniep/backend.h"
#include "uniep/communicator.h"

namespace uniep::tool {

/// Throws where --ranks is given, not 0, and a launcher has started another number of processes.
void require_ranks_of_launcher(int given);

/// Throws where the backend has no ranks on so many hosts.
void require_hosts(Backend backend, int hosts);

/// "4", "4 on 2 hosts": for reports.
std::string ranks_text(int ranks, int hosts);

inline constexpr int kDefaultCpuRanks = 2;

/// Throws where so many ranks cannot have their GPUs here.
void require_gpus(int ranks);

/// "4 ranks on 1 GPU (UNIEP_SHARE_DEVICE): times mean nothing"; empty where each has its own.
std::string sharing_text(int ranks, int gpus);
std::string sharing_of(const Communicator& member);

/// "2 x NVIDIA H200 (...)", and where ranks share them how many do: the GPUs of a group of
/// processes that this one belongs to.
std::string gpus_text(const Communicator& member);

}  // namespace uniep::tool
