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

DeviceTurns::DeviceTurns() {
  for (Last* last : {&uncaptured_, &captured_}) {
    check_cuda(cudaEventCreateWithFlags(&last->done, cudaEventDisableTiming), "create an event");
  }
}

DeviceTurns::Begun DeviceTurns::begin(cudaStream_t stream, const void* layer) {
  const unsigned long long capture = capture_of(stream);
  const std::lock_guard lock(mutex_);
  Last& last = capture == 0 ? uncaptured_ : captured_;
  if (last.capture != capture) last = {.done = last.done, .capture = capture};
  if (last.layer != nullptr && last.layer != layer && last.stream != stream) {
    check_cuda(cudaStreamWaitEvent(stream, last.done, 0), "make a stream wait");
  }
  return {last, capture, last.ended};
}

void DeviceTurns::end(const Begun& begun, cudaStream_t stream, const void* layer) noexcept {
  const std::lock_guard lock(mutex_);
  Last& last = begun.last;
  if (last.capture != begun.capture) return;  // of a capture that another one has followed
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
