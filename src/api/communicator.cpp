#include "uniep/communicator.h"

#include "api/no_cuda.h"
#include "base/check.h"
#include "group/host_layout.h"
#include "group/joining.h"
#include "group/process_group.h"
#ifdef UNIEP_HAS_CUDA
#include "group/cuda/cuda_communicator.h"
#endif

namespace uniep {
namespace {

void require_backend(Backend backend) {
  require(backend == Backend::kCpu || backend == Backend::kCuda, ErrorCode::kInvalidArgument,
          "backend is ", static_cast<int>(backend), "; 0 (CPU) and 1 (CUDA) are accepted");
#ifndef UNIEP_HAS_CUDA
  require(backend == Backend::kCpu, ErrorCode::kUnsupported, kNoCuda);
#endif
}

Communicator communicator_of(Backend backend, GroupMember member) {
  require_backend_of(member.layout, backend);
#ifdef UNIEP_HAS_CUDA
  if (backend == Backend::kCuda) {
    return Communicator(
        ended_by_its_process(std::make_shared<cuda::CudaCommunicator>(std::move(member))));
  }
#endif
  (void)backend;
  if (member.size == 1) return Communicator::cpu_group(1)[0];
  const int rank = member.rank;
  return Communicator(ended_by_its_process(
      std::make_shared<CpuCommunicator>(ProcessGroup::make(std::move(member)), rank)));
}

}  // namespace

Communicator Communicator::from_callbacks(const GroupOptions& options) {
  try {
    require_backend(options.backend);
  } catch (const Error& e) {
    refuse_group(options, e);
  }
  return communicator_of(options.backend, join_group(options));
}

RankLayout Communicator::find_hosts(const GroupOptions& options) {
  return uniep::find_hosts(options);
}

Communicator Communicator::cpu_from_environment() {
  return communicator_of(Backend::kCpu, join_group_of_environment());
}

Communicator Communicator::cuda_from_environment() {
  require_backend(Backend::kCuda);
  return communicator_of(Backend::kCuda, join_group_of_environment());
}

}  // namespace uniep
