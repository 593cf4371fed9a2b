#include "cuda/device_turns.h"

#include <map>

#include "base/cuda/check_cuda.h"
#include "cuda/capture.h"

namespace uniep::cuda {

DeviceTurns& DeviceTurns::of_device() {
  static std::mutex mutex;
  static auto& of_devices = *new std::map<int, DeviceTurns*>;  // outlives what uses it at exit
  int device = 0;
  check_cuda(cudaGetDevice(&device), "ask for the device");
  const std::lock_guard lock(mutex);
  DeviceTurns*& turns = of_devices[device];
  if (turns == nullptr) turns = new DeviceTurns;
  return *turns;
}

DeviceTurns::Last& DeviceTurns::last_of(unsigned long long capture) {
  // Nobody says when a capture has ended; so many are not under way at a time. Numbers grow.
  constexpr std::size_t kMostCaptures = 16;
  Last& last = last_[capture];
  if (last.done != nullptr) return last;
  check_cuda(cudaEventCreateWithFlags(&last.done, cudaEventDisableTiming), "create an event");
  if (last_.size() > 1 + kMostCaptures) {
    auto oldest = last_.upper_bound(0);
    if (oldest->first == capture) ++oldest;
    ignore_cuda(cudaEventDestroy(oldest->second.done));
    last_.erase(oldest);
  }
  return last;
}

DeviceTurns::Begun DeviceTurns::begin(cudaStream_t stream, const void* layer) {
  const unsigned long long capture = capture_of(stream);
  const std::lock_guard lock(mutex_);
  const Last& last = last_of(capture);
  if (last.layer != nullptr && last.layer != layer && last.stream != stream) {
    check_cuda(cudaStreamWaitEvent(stream, last.done, 0), "make a stream wait");
  }
  return {capture, last.ended};
}

void DeviceTurns::end(const Begun& begun, cudaStream_t stream, const void* layer) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = last_.find(begun.capture);
  if (found == last_.end()) return;  // many captures have begun meanwhile
  Last& last = found->second;
  // A call of another thread has ended meanwhile: whoever waits for this one waits for that, too.
  const bool overtaken = last.ended != begun.ended && last.layer != nullptr;
  if (overtaken && last.stream != stream) (void)cudaStreamWaitEvent(stream, last.done, 0);
  const bool recorded = cudaEventRecord(last.done, stream) == cudaSuccess;
  (void)cudaGetLastError();  // nobody hears of an error of these; a later launch must not find it
  last.layer = recorded ? layer : nullptr;
  last.stream = stream;
  ++last.ended;
}

}  // namespace uniep::cuda
