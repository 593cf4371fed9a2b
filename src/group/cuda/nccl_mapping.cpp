// Symmetric memory as an NCCL window: works wherever NCCL does, and physical memory lives as long
// as anybody has it mapped.
#include <chrono>
#include <cstring>
#include <thread>

#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"
#include "base/deadline.h"
#include "group/cuda/nccl_library.h"
#include "group/cuda/peer_pointers.h"
#include "group/cuda/symmetric_mapping.h"

namespace uniep::cuda {
namespace {

class NcclMapping final : public SymmetricMemory::Mapping {
 public:
  explicit NcclMapping(const SymmetricRequest& request)
      : nccl_(NcclLibrary::get()), request_(request), device_(current_device()) {
    nccl_.check(nccl_.mem_alloc(&memory_, static_cast<std::size_t>(request.bytes)),
                cat("allocate ", request.bytes, " bytes").c_str());
  }

  ~NcclMapping() override {
    const DeviceScope scope(device_);
    // Errors would say that the context is broken or a peer is gone: there is nothing left to do.
    ignore_cuda(cudaDeviceSynchronize());  // passes may still use the memory
    if (window_ != nullptr) (void)nccl_.window_deregister(comm_, window_);
    if (comm_ != nullptr) (void)nccl_.abort(comm_);
    if (memory_ != nullptr) (void)nccl_.mem_free(memory_);
  }

  /// Connects all ranks, at the same time; ends within the time limit, whatever the others do.
  void connect(const ncclUniqueId& id) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    wait_for(nccl_.init(&comm_, request_.size, id, request_.rank, &config), "start NCCL");
    require_one_domain();
    const auto bytes = static_cast<std::size_t>(request_.bytes);
    wait_for(nccl_.window_register(comm_, memory_, bytes, &window_, NCCL_WIN_COLL_SYMMETRIC),
             "register a window with NCCL");
    require(window_ != nullptr, ErrorCode::kUnsupported,
            "NCCL registers no symmetric windows on this machine");
    read_peers();
  }

  void* local() const override { return memory_; }
  std::vector<void*> peers() const override { return peers_; }
  const char* kind() const override { return "nccl"; }

 private:
  /// Waits until what `result` began has come to its end.
  void wait_for(ncclResult_t result, const char* what) {
    const Deadline limit = Deadline::in(std::chrono::milliseconds(request_.limit_ms));
    while (result == ncclInProgress || (result == ncclSuccess && comm_ != nullptr)) {
      const bool begun = nccl_.async_error(comm_, &result) == ncclSuccess;
      if (!begun) result = ncclInternalError;
      if (result != ncclInProgress) break;
      request_.bootstrap.check();
      require(!limit.expired(), ErrorCode::kTimeout, "rank ", request_.rank, ": cannot ", what,
              " within ", request_.limit_ms, " ms (timeout_ms or UNIEP_TIMEOUT_MS)");
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    nccl_.check(result, what);
  }

  void require_one_domain() {
    const NcclTeam team = nccl_.lsa_team(comm_);
    require(team.ranks == request_.size && team.rank == request_.rank, ErrorCode::kUnsupported,
            "of ", request_.size, " ranks only ", team.ranks,
            " reach each other's memory by load and store, says NCCL");
  }

  void read_peers() {
    peers_.assign(static_cast<std::size_t>(request_.size), nullptr);
    if (nccl_.lsa_pointer != nullptr) {
      for (int r = 0; r < request_.size; ++r) {
        nccl_.check(nccl_.lsa_pointer(window_, 0, r, &peers_[static_cast<std::size_t>(r)]),
                    "ask NCCL for a peer's address");
      }
    } else {
      check_cuda(read_peer_pointers(window_, peers_), "read the peers' addresses from the window");
    }
    for (void* peer : peers_) {
      cudaPointerAttributes attributes{};
      check_cuda(cudaPointerGetAttributes(&attributes, peer), "look at a peer's address");
      require(attributes.type == cudaMemoryTypeDevice, ErrorCode::kUnsupported,
              "NCCL gives an address for a peer's memory that is none of a device");
    }
    // The window's mapping of this rank's own memory is another address of the same bytes.
    peers_[static_cast<std::size_t>(request_.rank)] = memory_;
  }

  const NcclLibrary& nccl_;
  const SymmetricRequest request_;
  const int device_;
  void* memory_ = nullptr;
  ncclComm_t comm_ = nullptr;
  ncclWindow_t window_ = nullptr;
  std::vector<void*> peers_;
};

}  // namespace

std::unique_ptr<SymmetricMemory::Mapping> make_nccl_mapping(const SymmetricRequest& request) {
  std::unique_ptr<NcclMapping> mapping;
  const auto ids = together(request.bootstrap, request.limit_ms, "nccl memory", [&] {
    mapping = std::make_unique<NcclMapping>(request);
    ncclUniqueId id{};
    const NcclLibrary& nccl = NcclLibrary::get();
    if (request.rank == 0) nccl.check(nccl.unique_id(&id), "make an id of a group");
    return std::string(id.internal, sizeof(id.internal));
  });
  ncclUniqueId id{};
  std::memcpy(id.internal, ids[0].data(), sizeof(id.internal));
  // Twice the limit: a rank that fails at once waits here for those that wait for it in NCCL.
  together(request.bootstrap, 2 * request.limit_ms, "nccl window", [&] {
    mapping->connect(id);
    return std::string();
  });
  return mapping;
}

}  // namespace uniep::cuda
