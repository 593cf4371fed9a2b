#include "group/cuda/cuda_communicator.h"

#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"
#include "base/cuda/driver.h"
#include "base/env.h"
#include "group/cuda/device_sharing.h"
#include "group/cuda/symmetric_mapping.h"

namespace uniep::cuda {
namespace {

std::string uuid_of(int device) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device), "read the device's properties");
  return {properties.uuid.bytes, sizeof(properties.uuid.bytes)};
}

RankGpu use_device(int device) {
  require_device(device);
  check_cuda(cudaSetDevice(device), cat("use CUDA device ", device));
  check_cuda(cudaFree(nullptr), cat("use CUDA device ", device));  // makes the context
  int mps = 0;
  check_cuda(cudaDeviceGetAttribute(&mps, cudaDevAttrMpsEnabled, device), "ask for CUDA MPS");
  return {.uuid = uuid_of(device), .mps = mps != 0};
}

/// A launcher may show each process one GPU alone, which is then device 0 of all. Whether these are
/// different ones, their UUIDs say.
void set_sharing(GroupMember& member) {
  member.share_device = member.share_device || env_share_device();
  const int seen = device_count();
  if (member.share_device || seen == 1) member.device = device_of(member.device, seen);
}

/// What ranks say of sharing, whether or not it can be read.
std::string text_of_sharing(const GroupMember& member) {
  const std::string wanted = env_text("UNIEP_SHARE_DEVICE").value_or("0");
  return member.share_device || wanted != "0" ? "that may share GPUs" : "with a GPU each";
}

/// The device of this process that has the UUID; -1 where it sees none.
int device_with(const std::string& uuid) {
  for (int d = 0; d < device_count(); ++d) {
    if (uuid_of(d) == uuid) return d;
  }
  return -1;
}

/// Ranks signal by atomics on each other's memory, which a link must carry: over PCIe they would be
/// lost, and waits expire. Of GPUs that this process does not see, nobody can ask.
void require_atomics(const GroupMember& member, const std::vector<RankGpu>& gpus) {
  const auto own = static_cast<std::size_t>(member.rank);
  for (std::size_t r = 0; r < gpus.size(); ++r) {
    if (gpus[r].uuid == gpus[own].uuid) continue;
    const int peer = device_with(gpus[r].uuid);
    if (peer < 0) continue;
    int native = 0;
    check_cuda(cudaDeviceGetP2PAttribute(&native, cudaDevP2PAttrNativeAtomicSupported,
                                         member.device, peer),
               "ask what a link between GPUs can do");
    require(native != 0, ErrorCode::kUnsupported, "no link that carries atomics connects the GPU ",
            "of rank ", member.rank, " (device ", member.device, ") with that of rank ", r,
            " (device ", peer, "); GPUs that are all connected by NVLink are accepted");
  }
}

/// Collective: decides on a member's device and makes it this thread's. Returns how many GPUs the
/// group has.
int use_devices(GroupMember& member) {
  const std::string call = cat("CUDA communicator of ranks ", text_of_sharing(member));
  std::vector<RankGpu> gpus;
  for (const std::string& bytes : together(*member.bootstrap, member.limit_ms, call, [&] {
         set_sharing(member);
         if (member.processes) {
           member.processes->require_complete();
         }
         return to_bytes(use_device(member.device));
       })) {
    gpus.push_back(rank_gpu(bytes));
  }
  const int count = count_gpus(gpus, member.share_device);  // alike on all ranks
  together(*member.bootstrap, member.limit_ms, "links between GPUs", [&] {
    require_atomics(member, gpus);
    return std::string();
  });
  return count;
}

}  // namespace

CudaCommunicator::CudaCommunicator(GroupMember member)
    : member_(std::move(member)), gpus_(use_devices(member_)) {}

std::shared_ptr<void> CudaCommunicator::use_device() const {
  return std::make_shared<DeviceScope>(member_.device);
}

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
