#include "ranks.h"

#include <algorithm>

#include "base/check.h"
#include "machine.h"
#ifdef UNIEP_HAS_CUDA
#include "comm/process_environment.h"
#include "cuda/driver.h"
#include "launcher.h"
#endif

namespace uniep::tool {
namespace {

#ifdef UNIEP_HAS_CUDA
int with_cuda_ranks(int count, const Invocation& invocation, const std::function<void(int)>& refuse,
                    const std::function<int(const Ranks&)>& body) {
  if (!process_environment()) {
    const int ranks = count > 0 ? count : std::max(1, cuda::device_count());
    refuse(ranks);
    for (int device = 0; device < ranks; ++device) cuda::require_device(device);
    return launch_ranks(ranks, invocation.arguments);
  }
  const Communicator member = Communicator::cuda_from_environment();
  const auto device = cuda_bench_device();
  return body(
      {.count = member.size(),
       .speaks = member.rank() == 0,
       .backend = Backend::kCuda,
       .machine = cat(member.size(), " x ", cuda::device_text(0), ", ", to_string(this_machine())),
       .no_floor = device->no_gemms_reason(),
       .run = [&](const auto& of_rank) {
         Communicator own = member;
         of_rank(own, *device);
       }});
}
#endif

}  // namespace

int with_ranks(Backend backend, int count, const Invocation& invocation,
               const std::function<void(int)>& refuse,
               const std::function<int(const Ranks&)>& body) {
#ifdef UNIEP_HAS_CUDA
  if (backend == Backend::kCuda) return with_cuda_ranks(count, invocation, refuse, body);
#endif
  require(backend == Backend::kCpu, ErrorCode::kUnsupported,
          "this build has no CUDA backend; --backend cpu is accepted");
  (void)invocation;
  const int ranks = count > 0 ? count : kDefaultCpuRanks;
  refuse(ranks);
  const auto device = cpu_bench_device();
  return body({.count = ranks,
               .speaks = true,
               .backend = Backend::kCpu,
               .machine = to_string(this_machine()),
               .no_floor = device->no_gemms_reason(),
               .run = [&](const auto& of_rank) {
                 run_ranks(Communicator::cpu_group(ranks),
                           [&](Communicator& member) { of_rank(member, *device); });
               }});
}

}  // namespace uniep::tool
