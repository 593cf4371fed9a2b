// Symmetric memory that the caller has mapped between the ranks.
#include <utility>

#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"
#include "group/cuda/release_words.h"
#include "group/cuda/symmetric_mapping.h"

namespace uniep::cuda {
namespace {

class CallerMapping final : public SymmetricMemory::Mapping {
 public:
  explicit CallerMapping(const SymmetricRequest& request)
      : device_(current_device()), peers_(request.caller.peers) {
    void*& own = peers_[static_cast<std::size_t>(request.rank)];
    // The caller's mapping of this rank's own memory may be another address of the same bytes.
    if (request.caller.local != nullptr) own = request.caller.local;
    local_ = own;
    if (tells(request)) words_ = std::make_unique<ReleaseWords>(request.rank, request.size);
  }

  ~CallerMapping() override {
    const DeviceScope scope(device_);
    // Errors would say that the context is broken or a peer is gone: there is nothing left to do.
    ignore_cuda(cudaDeviceSynchronize());
    if (!release) release = [] {};
    if (words_) {
      words_->tell_peers();
      when_released(std::move(words_), std::move(release));
    } else {
      release();
    }
    (void)cudaGetLastError();
  }

  /// Whether ranks tell one another that they have let go: where the caller wants to know.
  static bool tells(const SymmetricRequest& request) {
    return request.caller.release != nullptr && request.size > 1;
  }

  /// The words by which ranks tell one another, as bytes.
  std::string exported() { return to_bytes(words_->exported()); }

  void open(const std::vector<std::string>& of_ranks) {
    std::vector<IpcPart> words;
    for (const std::string& bytes : of_ranks) words.push_back(ipc_part(bytes));
    words_->open(words);
  }

  void* local() const override { return local_; }
  std::vector<void*> peers() const override { return peers_; }
  const char* kind() const override { return "caller"; }

 private:
  const int device_;
  std::vector<void*> peers_;
  void* local_ = nullptr;
  std::unique_ptr<ReleaseWords> words_;
};

}  // namespace

std::unique_ptr<SymmetricMemory::Mapping> make_caller_mapping(const SymmetricRequest& request) {
  if (!CallerMapping::tells(request)) return std::make_unique<CallerMapping>(request);
  std::unique_ptr<CallerMapping> mapping;
  const auto exported = together(request.bootstrap, request.limit_ms, "words of release", [&] {
    mapping = std::make_unique<CallerMapping>(request);
    return mapping->exported();
  });
  together(request.bootstrap, request.limit_ms, "words of release mapped", [&] {
    mapping->open(exported);
    return std::string();
  });
  return mapping;
}

}  // namespace uniep::cuda
