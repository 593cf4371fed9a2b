#include "common/ranks.h"

#include <algorithm>

#include "base/check.h"
#include "base/env.h"
#include "group/process_environment.h"
#ifdef UNIEP_HAS_CUDA
#include "base/cuda/driver.h"
#include "group/cuda/cuda_communicator.h"
#endif

namespace uniep::tool {

std::string sharing_text(int ranks, int gpus) {
  if (gpus >= ranks) return "";
  return cat(ranks, " ranks on ", gpus, gpus == 1 ? " GPU" : " GPUs",
             " (UNIEP_SHARE_DEVICE): times mean nothing");
}

#ifdef UNIEP_HAS_CUDA
namespace {
int gpus_of(const Communicator& member) {
  return dynamic_cast<cuda::CudaCommunicator&>(*member.impl()).gpus();
}
}  // namespace

void require_gpus(int ranks) {
  const int devices = cuda::device_count();
  // Ranks that share have the first ones in turn.
  const int used = env_share_device() && devices > 0 ? std::min(ranks, devices) : ranks;
  for (int device = 0; device < used; ++device) cuda::require_device(device);
}

std::string sharing_of(const Communicator& member) {
  return sharing_text(member.size(), gpus_of(member));
}

std::string gpus_text(const Communicator& member) {
  const int gpus = gpus_of(member);
  return cat(gpus < member.size() ? cat(member.size(), " ranks that share ") : "", gpus, " x ",
             cuda::device_text(0));
}
#endif

void require_ranks_of_launcher(int given) {
  const auto process = process_environment();
  if (given == 0 || !process) return;
  require(given == process->size, ErrorCode::kInvalidArgument, "--ranks is ", given,
          ", and a launcher has started ", process->size, " processes (WORLD_SIZE); ",
          process->size, " is accepted, or no --ranks");
}

void require_hosts(Backend backend, int hosts) {
  require(hosts <= 1 || backend == Backend::kCpu, ErrorCode::kUnsupported, "--hosts is ", hosts,
          "; with --backend cuda 1 is accepted, and with --backend cpu more");
}

std::string ranks_text(int ranks, int hosts) {
  return hosts == 1 ? cat(ranks) : cat(ranks, " on ", hosts, " hosts");
}

}  // namespace uniep::tool
