#pragma once

#include <string>
#include <vector>

namespace uniep::cuda {

// Several ranks on one GPU: what follows from UNIEP_SHARE_DEVICE, decided by every rank alike.

/// What a rank tells the others of its GPU.
struct RankGpu {
  std::string uuid;  ///< 16 bytes
  bool mps = false;  ///< CUDA MPS runs the processes of this GPU side by side
};
std::string to_bytes(const RankGpu& gpu);
RankGpu rank_gpu(const std::string& bytes);

/// The device of a process with this LOCAL_RANK, of `devices` that it sees, where ranks may share
/// them.
int device_of(int local_rank, int devices);

/// How many GPUs the ranks have together. Throws where two ranks have the same one though they may
/// not `share` it, or cannot.
int count_gpus(const std::vector<RankGpu>& ranks, bool share);

/// What UNIEP_SYMMETRIC_MEMORY=`kind` comes to where ranks share GPUs: NCCL refuses two ranks on
/// one, so only CUDA IPC is left.
std::string kind_of_shared(const std::string& kind);

}  // namespace uniep::cuda
