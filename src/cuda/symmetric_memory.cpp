#include "cuda/symmetric_memory.h"

#include "base/env.h"
#include "cuda/check.h"
#include "cuda/device_scope.h"
#include "cuda/symmetric_mapping.h"

namespace uniep::cuda {
namespace {

/// A group of one needs memory only.
class LocalMapping final : public SymmetricMemory::Mapping {
 public:
  explicit LocalMapping(std::int64_t bytes) : device_(current_device()) {
    check_cuda(cudaMalloc(&memory_, static_cast<std::size_t>(bytes)),
               cat("allocate ", bytes, " bytes"));
  }
  ~LocalMapping() override {
    const DeviceScope scope(device_);
    (void)cudaFree(memory_);
  }
  void* local() const override { return memory_; }
  std::vector<void*> peers() const override { return {memory_}; }
  const char* kind() const override { return "local"; }

 private:
  const int device_;
  void* memory_ = nullptr;
};

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
  require(request.bytes > 0, ErrorCode::kInvalidArgument, "symmetric memory of ", request.bytes,
          " bytes; 1 or more is accepted");
  if (request.size == 1) return std::make_unique<LocalMapping>(request.bytes);
  const std::string kind = env_symmetric_memory();
  together(request.bootstrap, request.limit_ms,
           cat("symmetric memory of ", request.bytes, " bytes (UNIEP_SYMMETRIC_MEMORY=", kind, ")"),
           [] { return std::string(); });
  free_released_ipc_memory();  // what peers had before they came here, they have let go of
  if (kind == "nccl") return make_nccl_mapping(request);
  if (kind == "ipc") return make_ipc_mapping(request);
  return make_any_mapping(request);
}

}  // namespace

SymmetricMemory::SymmetricMemory(Bootstrap& bootstrap, int rank, int size, std::int64_t bytes,
                                 int limit_ms)
    : mapping_(make_mapping({bootstrap, rank, size, bytes, limit_ms})),
      local_(mapping_->local()),
      peers_(mapping_->peers()) {
  // Nobody may write to a peer before the peer has cleared its memory.
  together(bootstrap, limit_ms, "clear symmetric memory", [&] {
    check_cuda(cudaMemset(local_, 0, static_cast<std::size_t>(bytes)), "clear symmetric memory");
    check_cuda(cudaDeviceSynchronize(), "clear symmetric memory");
    return std::string();
  });
}

SymmetricMemory::~SymmetricMemory() = default;

const char* SymmetricMemory::kind() const { return mapping_->kind(); }

}  // namespace uniep::cuda
