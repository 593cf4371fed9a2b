#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group/cuda/ipc_memory.h"
#include "group/cuda/symmetric_memory.h"

namespace uniep::cuda {

/// The words by which ranks that have each other's memory mapped say that they have let go of it.
/// They do not destroy their objects together, and memory must not be freed while a peer may use
/// it.
///
/// A rank has a word for each of its peers, in device memory that is never freed: so the peer's
/// last access, by which it says so, always finds it.
class ReleaseWords {
 public:
  /// Takes words in memory of this thread's current device.
  ReleaseWords(int rank, int size);
  ~ReleaseWords();
  ReleaseWords(const ReleaseWords&) = delete;
  ReleaseWords& operator=(const ReleaseWords&) = delete;

  /// The device that they are on.
  int device() const;

  /// The words for the peers, who may write to them from now on.
  IpcPart exported();

  /// Maps the words of all ranks, in their order.
  void open(const std::vector<IpcPart>& of_ranks);

  /// Unmaps them, and says nothing; may throw.
  void close();

  /// No peer has this rank's words mapped: all is as before `exported`.
  void unshare() { exported_ = false; }

  /// Says to all peers that this rank has let go, and unmaps their words. Waits for the device.
  void tell_peers();

  /// Whether all peers have said so; false where the device fails.
  bool told_by_all() const;

 private:
  struct Slot;
  const int rank_;
  const int size_;
  const std::unique_ptr<Slot> slot_;
  std::vector<MappedPart> peers_;  // this rank's is empty
  bool exported_ = false;
};

/// Does `action`, on the words' device, when all peers have told `words`: in this call
/// or in a later one of `free_released_memory`. Where a peer has died and never told, it is not
/// done.
void when_released(std::unique_ptr<ReleaseWords> words, std::function<void()> action);

}  // namespace uniep::cuda
