#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>

namespace uniep::cuda {

/// Makes the collective calls of all layers on a device run in the order in which they are made,
/// whatever streams they are on. Side by side, kernels of two of them could wait for peers for
/// ever: each holds the SMs of one rank that the other one needs there. In which order graphs are
/// replayed is the caller's affair.
class DeviceTurns {
 public:
  /// The turns of this thread's device, which live as long as the process.
  static DeviceTurns& of_device();

 private:
  friend class DeviceTurn;

  /// The last of some calls.
  struct Last {
    cudaEvent_t done = nullptr;
    const void* layer = nullptr;  // null: there was none
    cudaStream_t stream = nullptr;
    std::uint64_t ended = 0;  // calls so far
  };
  /// What a call finds when it begins; `end` then knows which calls have ended meanwhile.
  struct Begun {
    unsigned long long capture = 0;
    std::uint64_t ended = 0;
  };

  Begun begin(cudaStream_t stream, const void* layer);
  void end(const Begun& begun, cudaStream_t stream, const void* layer) noexcept;
  Last& last_of(unsigned long long capture);

  std::mutex mutex_;
  /// By the number of the capture, in which calls are in order among themselves; 0: of those that
  /// run at once.
  std::map<unsigned long long, Last> last_;
};

/// While a call of `layer` is put on its stream: behind those of other layers. What one layer has
/// put on several streams is its own affair (StreamOrder).
class DeviceTurn {
 public:
  DeviceTurn(cudaStream_t stream, const void* layer)
      : stream_(stream), layer_(layer), begun_(turns_.begin(stream, layer)) {}
  DeviceTurn(const DeviceTurn&) = delete;
  DeviceTurn& operator=(const DeviceTurn&) = delete;
  ~DeviceTurn() { turns_.end(begun_, stream_, layer_); }

 private:
  DeviceTurns& turns_ = DeviceTurns::of_device();
  const cudaStream_t stream_;
  const void* const layer_;
  const DeviceTurns::Begun begun_;
};

}  // namespace uniep::cuda
