#include "group/cuda/device_sharing.h"

#include "base/check.h"

namespace uniep::cuda {
namespace {

constexpr std::size_t kUuidBytes = 16;

void require_sharable(const RankGpu& gpu, std::size_t a, std::size_t b, bool share) {
  require(share, ErrorCode::kInvalidArgument, "ranks ", a, " and ", b,
          " use the same GPU; one GPU for each rank (LOCAL_RANK) is accepted, or "
          "UNIEP_SHARE_DEVICE=1, which is for tests and development, and slow");
  require(!gpu.mps, ErrorCode::kUnsupported, "ranks ", a, " and ", b,
          " share a GPU that CUDA MPS serves, where kernels that wait for each other may never run "
          "together; UNIEP_SHARE_DEVICE=1 is accepted without MPS");
}

}  // namespace

std::string to_bytes(const RankGpu& gpu) {
  ensure(gpu.uuid.size() == kUuidBytes, "a UUID of ", gpu.uuid.size(), " bytes");
  return (gpu.mps ? '1' : '0') + gpu.uuid;
}

RankGpu rank_gpu(const std::string& bytes) {
  ensure(bytes.size() == 1 + kUuidBytes, "a GPU in ", bytes.size(), " bytes");
  return {.uuid = bytes.substr(1), .mps = bytes[0] == '1'};
}

int device_of(int local_rank, int devices) {
  return devices > 0 ? local_rank % devices : local_rank;
}

int count_gpus(const std::vector<RankGpu>& ranks, bool share) {
  int gpus = 0;
  for (std::size_t b = 0; b < ranks.size(); ++b) {
    bool first = true;
    for (std::size_t a = 0; a < b; ++a) {
      if (ranks[a].uuid != ranks[b].uuid) continue;
      require_sharable(ranks[b], a, b, share);
      first = false;
    }
    gpus += first ? 1 : 0;
  }
  return gpus;
}

std::string kind_of_shared(const std::string& kind) {
  require(
      kind != "nccl", ErrorCode::kUnsupported,
      "UNIEP_SYMMETRIC_MEMORY is 'nccl', and ranks share a GPU (UNIEP_SHARE_DEVICE), which NCCL "
      "does not support; auto and ipc are accepted");
  return "ipc";
}

}  // namespace uniep::cuda
