#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace uniep::cuda {

/// Memory of other processes that is mapped here. A handle stands for a whole allocation, of which
/// several users may have a part (PyTorch's allocator divides its blocks), and is opened once for
/// all of them. Any thread may call.
class HandleCache {
 public:
  /// Both may throw.
  struct Functions {
    std::function<void*(const std::string& handle)> open;
    std::function<void(void*)> close;
  };
  explicit HandleCache(Functions functions) : functions_(std::move(functions)) {}

  /// The address at which `handle` is mapped for this thread's current device, which is `device`.
  void* acquire(int device, const std::string& handle);

  /// Ends an `acquire`; the last one unmaps. If that throws, the handle is forgotten all the same.
  void release(int device, const std::string& handle);

 private:
  struct Opened {
    void* address = nullptr;
    int users = 0;
  };
  const Functions functions_;
  std::mutex mutex_;
  std::map<std::pair<int, std::string>, Opened> opened_;
};

}  // namespace uniep::cuda
