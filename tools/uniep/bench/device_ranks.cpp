#include "bench/device_ranks.h"

#include <algorithm>

#include "base/check.h"
#include "base/env.h"
#include "common/machine.h"
#include "group/process_environment.h"
#include "uniep/rank_layout.h"
#ifdef UNIEP_HAS_CUDA
#include "base/cuda/driver.h"
#include "common/launcher.h"
#endif

namespace uniep::tool {
namespace {

void refuse_times(const std::string& command, const std::string& sharing) {
  require(sharing.empty(), ErrorCode::kUnsupported, command, " measures, and here are ", sharing,
          "; one GPU for each rank is accepted");
}

/// CPU ranks are threads here: what a launcher has started would all do the same.
void require_one_process() {
  const auto process = process_environment();
  if (!process) return;
  require(process->size == 1, ErrorCode::kInvalidArgument, "a launcher has started ", process->size,
          " processes (WORLD_SIZE), and here CPU ranks are threads of one; this "
          "command is accepted without a launcher, or with --backend cuda");
}

#ifdef UNIEP_HAS_CUDA
int with_cuda_ranks(int count, const Invocation& invocation, const std::function<void(int)>& refuse,
                    const std::function<int(const Ranks&)>& body) {
  if (!process_environment()) {
    const int ranks = count > 0 ? count : std::max(1, cuda::device_count());
    refuse(ranks);
    require_gpus(ranks);
    return launch_ranks(ranks, invocation.arguments);
  }
  const Communicator member = Communicator::cuda_from_environment();
  const std::string sharing = sharing_of(member);
  const auto device = cuda_bench_device();
  return body({.count = member.size(),
               .speaks = member.rank() == 0,
               .backend = Backend::kCuda,
               .machine = cat(gpus_text(member), ", ", to_string(this_machine())),
               .sharing = sharing,
               .no_floor = sharing.empty() ? device->no_gemms_reason() : sharing,
               .run = [&](const auto& of_rank) {
                 Communicator own = member;
                 of_rank(own, *device);
               }});
}
#endif

}  // namespace

void refuse_sharing(const std::string& command, Backend backend, int ranks) {
#ifdef UNIEP_HAS_CUDA
  // Without the variable, too few GPUs are refused for what they are.
  const int devices = cuda::device_count();
  if (backend == Backend::kCuda && env_share_device() && devices > 0) {
    refuse_times(command, sharing_text(ranks, devices));
  }
#endif
  (void)command, (void)backend, (void)ranks;
}

void refuse_sharing(const std::string& command, const Ranks& ranks) {
  refuse_times(command, ranks.sharing);
}

std::string link_text_of(const Ranks& ranks) {
  if (ranks.backend == Backend::kCuda) return "";
  const std::string link = link_text();
  const double network = ranks.hosts > 1 ? env_network_gbps() : 0;
  if (network == 0) return link;
  return cat(link, link.empty() ? "" : "; ", "network between hosts emulated, ", network, " GB/s");
}

int with_ranks(const RanksWanted& wanted, const Invocation& invocation,
               const std::function<void(int)>& refuse,
               const std::function<int(const Ranks&)>& body) {
  require_hosts(wanted.backend, wanted.hosts);
  require_ranks_of_launcher(wanted.backend == Backend::kCuda ? wanted.count : 0);
#ifdef UNIEP_HAS_CUDA
  if (wanted.backend == Backend::kCuda) {
    return with_cuda_ranks(wanted.count, invocation, refuse, body);
  }
#endif
  require(wanted.backend == Backend::kCpu, ErrorCode::kUnsupported,
          "this build has no CUDA backend; --backend cpu is accepted");
  (void)invocation;
  require_one_process();
  const int ranks = wanted.count > 0 ? wanted.count : kDefaultCpuRanks;
  const int hosts = std::max(wanted.hosts, 1);
  (void)layout_of_hosts(ranks, hosts);
  refuse(ranks);
  const auto device = cpu_bench_device();
  return body({.count = ranks,
               .hosts = hosts,
               .speaks = true,
               .backend = Backend::kCpu,
               .machine = to_string(this_machine()),
               .no_floor = device->no_gemms_reason(),
               .run = [&](const auto& of_rank) {
                 run_ranks(Communicator::cpu_group(ranks, hosts),
                           [&](Communicator& member) { of_rank(member, *device); });
               }});
}

}  // namespace uniep::tool
