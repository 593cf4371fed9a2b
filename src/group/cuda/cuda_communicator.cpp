#include "group/cuda/cuda_communicator.h"

#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"
#include "base/cuda/driver.h"
#include "base/env.h"
#include "group/cuda/device_sharing.h"
#include "group/cuda/symmetric_mapping.h"

namespace uniep::cuda {
namespace {

RankGpu use_device(int device) {
  require_device(device);
  check_cuda(cudaSetDevice(device), cat("use CUDA device ", device));
  check_cuda(cudaFree(nullptr), cat("use CUDA device ", device));  // makes the context
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device), "read the device's properties");
  int mps = 0;
  check_cuda(cudaDeviceGetAttribute(&mps, cudaDevAttrMpsEnabled, device), "ask for CUDA MPS");
  return {.uuid = {properties.uuid.bytes, sizeof(properties.uuid.bytes)}, .mps = mps != 0};
}

/// A launcher may show each process one GPU alone, which is then device 0 of all. Whether these are
/// different ones, their UUIDs say.
GroupMember with_sharing(GroupMember member) {
  member.share_device = member.share_device || env_share_device();
  const int seen = device_count();
  if (member.share_device || seen == 1) member.device = device_of(member.device, seen);
  return member;
}

/// Collective: makes a member's device this thread's, and returns how many GPUs the group has.
int use_devices(const GroupMember& member) {
  const std::string call = cat("CUDA communicator of ranks ",
                               member.share_device ? "that may share GPUs" : "with a GPU each");
  std::vector<RankGpu> gpus;
  for (const std::string& bytes : together(*member.bootstrap, member.limit_ms, call,
                                           [&] { return to_bytes(use_device(member.device)); })) {
    gpus.push_back(rank_gpu(bytes));
  }
  return count_gpus(gpus, member.share_device);  // every rank sees the same, so all refuse alike
}

}  // namespace

CudaCommunicator::CudaCommunicator(GroupMember member)
    : member_(with_sharing(std::move(member))), gpus_(use_devices(member_)) {}

CudaCommunicator::~CudaCommunicator() { free_released_memory(); }

std::unique_ptr<SymmetricMemory> CudaCommunicator::symmetric_memory(std::int64_t bytes,
                                                                    int limit_ms,
                                                                    const CallerMemory& caller) {
  const DeviceScope scope(member_.device);
  return std::make_unique<SymmetricMemory>(*member_.bootstrap, member_.rank, member_.size, bytes,
                                           limit_ms, caller, gpus_ < member_.size);
}

Communicator single_rank() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "ask for the current device");
  return Communicator(ended_by_its_process(std::make_shared<CudaCommunicator>(alone(device))));
}

}  // namespace uniep::cuda
