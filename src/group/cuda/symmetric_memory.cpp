#include "group/cuda/symmetric_memory.h"

#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"
#include "base/env.h"
#include "group/cuda/device_sharing.h"
#include "group/cuda/symmetric_mapping.h"

namespace uniep::cuda {
namespace {

/// A group of one needs memory only.
class LocalMapping final : public SymmetricMemory::Mapping {
 public:
  LocalMapping(std::int64_t bytes, void* callers) : device_(current_device()), memory_(callers) {
    if (memory_ != nullptr) return;
    check_cuda(cudaMalloc(&memory_, static_cast<std::size_t>(bytes)),
               cat("allocate ", bytes, " bytes"));
    release = [memory = memory_] { ignore_cuda(cudaFree(memory)); };
  }
  ~LocalMapping() override {
    const DeviceScope scope(device_);
    ignore_cuda(cudaDeviceSynchronize());
    if (release) release();
  }
  void* local() const override { return memory_; }
  std::vector<void*> peers() const override { return {memory_}; }
  const char* kind() const override { return "local"; }

 private:
  const int device_;
  void* memory_;
};

void require_device_memory(void* address, const std::string& whose) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, address), cat("look at ", whose));
  require(attributes.type == cudaMemoryTypeDevice, ErrorCode::kInvalidArgument, whose, " is at ",
          address, ", which is no address of a device; memory of a CUDA device is accepted");
  require(reinterpret_cast<std::uintptr_t>(address) % kSymmetricAlignment == 0,
          ErrorCode::kInvalidArgument, whose, " begins at ", address, "; a multiple of ",
          kSymmetricAlignment, " is accepted");
}

/// What CUDA can tell of it; whether it is large enough, only where it is exported.
void require_usable(const CallerMemory& caller, int rank, int size) {
  require(caller.peers.empty() || caller.peers.size() == static_cast<std::size_t>(size),
          ErrorCode::kInvalidArgument, "symmetric memory of ", caller.peers.size(),
          " ranks is passed; that of all ", size, " is accepted, or this rank's alone");
  for (std::size_t r = 0; r < caller.peers.size(); ++r) {
    require_device_memory(caller.peers[r], cat("symmetric memory of rank ", r));
  }
  if (caller.local != nullptr) {
    require_device_memory(caller.local, cat("symmetric memory of rank ", rank));
    cudaPointerAttributes attributes{};
    check_cuda(cudaPointerGetAttributes(&attributes, caller.local), "look at symmetric memory");
    require(attributes.device == current_device(), ErrorCode::kInvalidArgument,
            "symmetric memory of rank ", rank, " is on CUDA device ", attributes.device,
            "; that of the rank, ", current_device(), ", is accepted");
  }
}

/// The kind of memory, which all ranks have to say alike.
std::string text_of(const CallerMemory& caller) {
  if (!caller.peers.empty()) {
    return cat(", mapped by the caller", caller.release ? ", who takes it back" : "");
  }
  return caller.local != nullptr ? ", allocated by the caller" : "";
}

std::string kind_for(const SymmetricRequest& request, const std::string& wanted) {
  if (request.caller.local != nullptr) {
    require(wanted != "nccl", ErrorCode::kUnsupported,
            "UNIEP_SYMMETRIC_MEMORY is 'nccl', and the caller's memory is shared by CUDA IPC; auto "
            "and ipc are accepted, or memory that uniep allocates");
    return "ipc";
  }
  return request.shares_device ? kind_of_shared(wanted) : wanted;
}

/// All ranks fail here alike, so all go on alike.
std::unique_ptr<SymmetricMemory::Mapping> make_any_mapping(const SymmetricRequest& request) {
  try {
    return make_nccl_mapping(request);
  } catch (const Error& e) {
    const bool other_may_work =
        e.code() == ErrorCode::kUnsupported || e.code() == ErrorCode::kDevice;
    if (!other_may_work) throw;
  }
  (void)cudaGetLastError();
  return make_ipc_mapping(request);
}

std::unique_ptr<SymmetricMemory::Mapping> make_mapping(const SymmetricRequest& request) {
  const CallerMemory& caller = request.caller;
  require(request.bytes > 0, ErrorCode::kInvalidArgument, "symmetric memory of ", request.bytes,
          " bytes; 1 or more is accepted");
  require(caller.given() || !caller.release, ErrorCode::kInvalidArgument,
          "a release of symmetric memory is passed and no memory; both or neither are accepted");
  if (request.size == 1) {
    require_usable(caller, request.rank, request.size);
    return caller.peers.empty() ? std::make_unique<LocalMapping>(request.bytes, caller.local)
                                : make_caller_mapping(request);
  }
  std::string kind;
  together(request.bootstrap, request.limit_ms,
           cat("symmetric memory of ", request.bytes, " bytes (UNIEP_SYMMETRIC_MEMORY=",
               env_text("UNIEP_SYMMETRIC_MEMORY").value_or("auto"), ")", text_of(caller)),
           [&] {
             require_usable(caller, request.rank, request.size);
             kind = env_symmetric_memory();
             if (caller.peers.empty()) kind = kind_for(request, kind);
             return std::string();
           });
  free_released_memory();  // what peers had before they came here, they have let go of
  if (!caller.peers.empty()) return make_caller_mapping(request);
  if (kind == "nccl") return make_nccl_mapping(request);
  if (kind == "ipc") return make_ipc_mapping(request);
  return make_any_mapping(request);
}

}  // namespace

SymmetricMemory::SymmetricMemory(Bootstrap& bootstrap, int rank, int size, std::int64_t bytes,
                                 int limit_ms, const CallerMemory& caller, bool shares_device)
    : mapping_(make_mapping({bootstrap, rank, size, bytes, limit_ms, caller, shares_device})),
      local_(mapping_->local()),
      peers_(mapping_->peers()) {
  // Nobody may write to a peer before the peer has cleared its memory, and what the caller did with
  // his own has to be over.
  together(bootstrap, limit_ms, "clear symmetric memory", [&] {
    check_cuda(cudaDeviceSynchronize(), "clear symmetric memory");
    check_cuda(cudaMemset(local_, 0, static_cast<std::size_t>(bytes)), "clear symmetric memory");
    check_cuda(cudaDeviceSynchronize(), "clear symmetric memory");
    return std::string();
  });
  if (caller.release) mapping_->release = caller.release;
}

SymmetricMemory::~SymmetricMemory() = default;

const char* SymmetricMemory::kind() const { return mapping_->kind(); }

}  // namespace uniep::cuda
