// Symmetric memory by CUDA IPC handles: needs nothing but the driver. The memory is the caller's,
// or allocated here.
#include <utility>

#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"
#include "base/math.h"
#include "group/cuda/ipc_memory.h"
#include "group/cuda/release_words.h"
#include "group/cuda/symmetric_mapping.h"

namespace uniep::cuda {
namespace {

void* allocate(std::int64_t bytes) {
  const std::int64_t whole = round_up(bytes, kIpcBlock);
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, static_cast<std::size_t>(whole)),
             cat("allocate ", whole, " bytes"));
  return memory;
}

class IpcMapping final : public SymmetricMemory::Mapping {
 public:
  explicit IpcMapping(const SymmetricRequest& request)
      : device_(current_device()),
        rank_(request.rank),
        bytes_(request.bytes),
        words_(std::make_unique<ReleaseWords>(request.rank, request.size)),
        callers_(request.caller.local != nullptr),
        memory_(callers_ ? request.caller.local : allocate(request.bytes)) {}

  ~IpcMapping() override {
    const DeviceScope scope(device_);
    // Errors would say that the context is broken or a peer is gone: there is nothing left to do.
    ignore_cuda(cudaDeviceSynchronize());
    peers_.clear();
    std::function<void()> free = std::exchange(release, {});
    if (!callers_) free = [memory = memory_] { ignore_cuda(cudaFree(memory)); };
    if (!free) free = [] {};
    if (shared_) {
      words_->tell_peers();
      when_released(std::move(words_), std::move(free));
    } else {
      free();
    }
    (void)cudaGetLastError();
  }

  /// The memory and words as bytes for the peers, who may map them from now on.
  std::string exported() {
    const IpcPart memory = export_part(memory_, bytes_);
    shared_ = true;
    return to_bytes(memory) + to_bytes(words_->exported());
  }

  /// What all ranks exported.
  void open(const std::vector<std::string>& of_ranks) {
    std::vector<IpcPart> words;
    for (std::size_t r = 0; r < of_ranks.size(); ++r) {
      const std::string& bytes = of_ranks[r];
      words.push_back(ipc_part(bytes.substr(IpcPart::kBytes)));
      peers_.push_back(static_cast<int>(r) == rank_
                           ? MappedPart()
                           : MappedPart(ipc_part(bytes.substr(0, IpcPart::kBytes)),
                                        cat("the memory of rank ", r)));
    }
    words_->open(words);
  }

  /// Lets go of the peers' memory.
  void close() {
    for (MappedPart& peer : peers_) peer.close();
    words_->close();
  }
  /// No peer has this rank's memory: it can be freed as any other.
  void unshare() {
    shared_ = false;
    words_->unshare();
  }

  void* local() const override { return memory_; }
  std::vector<void*> peers() const override {
    std::vector<void*> all;
    for (const MappedPart& peer : peers_) all.push_back(peer.address());
    all[static_cast<std::size_t>(rank_)] = memory_;
    return all;
  }
  const char* kind() const override { return "ipc"; }

 private:
  const int device_;
  const int rank_;
  const std::int64_t bytes_;
  std::unique_ptr<ReleaseWords> words_;
  const bool callers_;
  void* const memory_;
  std::vector<MappedPart> peers_;  // this rank's is empty
  bool shared_ = false;
};

/// Collective, after a rank could not map all: without it no memory would ever be let go of by all.
void undo(const SymmetricRequest& request, IpcMapping& mapping) {
  try {
    together(request.bootstrap, request.limit_ms, "ipc unmapping", [&] {
      mapping.close();
      return std::string();
    });
    mapping.unshare();
  } catch (const Error&) {
    // A rank is gone, or its device: what led here says more.
  }
}

}  // namespace

std::unique_ptr<SymmetricMemory::Mapping> make_ipc_mapping(const SymmetricRequest& request) {
  std::unique_ptr<IpcMapping> mapping;
  std::vector<std::string> exported;
  try {
    exported = together(request.bootstrap, request.limit_ms, "ipc memory", [&] {
      mapping = std::make_unique<IpcMapping>(request);
      return mapping->exported();
    });
  } catch (const Error& e) {
    // If a rank refused, none goes on to map anything; if one was lost, others may have.
    const bool lost = e.code() == ErrorCode::kTimeout || e.code() == ErrorCode::kPeerFailed;
    if (mapping && !lost) mapping->unshare();
    throw;
  }
  try {
    together(request.bootstrap, request.limit_ms, "ipc mapping", [&] {
      mapping->open(exported);
      return std::string();
    });
  } catch (const Error&) {
    undo(request, *mapping);
    throw;
  }
  return mapping;
}

}  // namespace uniep::cuda
