#include "group/cuda/handle_cache.h"

#include "base/check.h"

namespace uniep::cuda {

void* HandleCache::acquire(int device, const std::string& handle) {
  const std::scoped_lock lock(mutex_);
  const auto key = std::pair(device, handle);
  auto found = opened_.find(key);
  if (found == opened_.end()) {
    found = opened_.emplace(key, Opened{.address = functions_.open(handle)}).first;
  }
  ++found->second.users;
  return found->second.address;
}

void HandleCache::release(int device, const std::string& handle) {
  const std::scoped_lock lock(mutex_);
  const auto found = opened_.find(std::pair(device, handle));
  ensure(found != opened_.end(), "a handle is released that is not open");
  if (--found->second.users > 0) return;
  void* const address = found->second.address;
  opened_.erase(found);
  functions_.close(address);
}

}  // namespace uniep::cuda
