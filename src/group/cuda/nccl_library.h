#pragma once

#include <nccl.h>

namespace uniep::cuda {

/// A set of ranks, as NCCL's device API describes it (ncclTeam_t, whose header is for nvcc only).
struct NcclTeam {
  int ranks, rank, stride;
};

/// NCCL, loaded at run time from UNIEP_NCCL_LIBRARY: machines without it still run the rest.
class NcclLibrary {
 public:
  /// Loads it at the first call. Throws Error(kUnsupported) where it is missing, older than 2.28,
  /// or already in use in this process with multicast (NCCL_NVLS_ENABLE) switched on.
  static const NcclLibrary& get();

  int version = 0;  ///< 22809: 2.28.9

  decltype(&::ncclGetErrorString) error_string = nullptr;
  decltype(&::ncclGetLastError) last_error = nullptr;
  decltype(&::ncclGetUniqueId) unique_id = nullptr;
  decltype(&::ncclCommInitRankConfig) init = nullptr;
  decltype(&::ncclCommGetAsyncError) async_error = nullptr;
  decltype(&::ncclCommAbort) abort = nullptr;
  decltype(&::ncclMemAlloc) mem_alloc = nullptr;
  decltype(&::ncclMemFree) mem_free = nullptr;
  decltype(&::ncclCommWindowRegister) window_register = nullptr;
  decltype(&::ncclCommWindowDeregister) window_deregister = nullptr;
  NcclTeam (*lsa_team)(ncclComm_t) = nullptr;  ///< ranks that reach each other by load and store
  /// Address of a rank's part of a window; null in 2.28, where only kernels can ask for it.
  ncclResult_t (*lsa_pointer)(ncclWindow_t, std::size_t offset, int rank, void** out) = nullptr;

  /// Throws Error(kDevice) unless `result` is success; `what` as in check_cuda.
  void check(ncclResult_t result, const char* what) const;

 private:
  NcclLibrary();
};

}  // namespace uniep::cuda
