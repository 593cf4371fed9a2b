#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "uniep/backend.h"
#include "uniep/macros.h"
#include "uniep/rank_layout.h"

namespace uniep {

class CommunicatorImpl;

/// Who this process is in a group of processes, where a launcher other than the environment says
/// so.
struct GroupOptions {
  int rank = 0;
  int size = 1;  ///< 1 to 64
  Backend backend = Backend::kCpu;
  int device = 0;  ///< CUDA device of this rank; without meaning on the CPU

  /// Collective among the group's processes: every rank passes `own`, the same number of bytes, and
  /// `all`, `size` times as many, receives them rank after rank. Called only while the communicator
  /// is made, from the calling thread: once, and where ranks are on several hosts twice. Not needed
  /// in a group of one.
  std::function<void(std::span<const std::byte> own, std::span<std::byte> all)> all_gather{};

  /// Several ranks may use one GPU: for tests and development, slow. UNIEP_SHARE_DEVICE=1 says the
  /// same.
  bool share_device = false;
  int timeout_ms = 0;  ///< of joining; 0: UNIEP_TIMEOUT_MS
};

/// One rank's membership in an expert-parallel group. A handle; copies mean the same member.
///
/// Calls on a Layer are collective: every rank of the group makes the same calls in the same order,
/// each rank from one thread at a time.
class UNIEP_API Communicator {
 public:
  Communicator(const Communicator&) = default;  // and so for moving: a handle is never empty
  Communicator& operator=(const Communicator&) = default;

  /// The members of a group whose ranks are threads of this process: element r is rank r, to be
  /// used from a thread of its own (`run_ranks` starts them). `size` is 1 to 64. With `hosts` > 1
  /// they are taken to be on as many equal hosts, of which each has a run of ranks: they share
  /// memory within these alone.
  static std::vector<Communicator> cpu_group(int size, int hosts = 1);

  /// This process' membership in a group of processes, which need nothing in common but
  /// `options.all_gather`. CPU processes may be on several hosts, with as many consecutive ranks on
  /// each; GPUs are of one host. Collective: waits until all ranks have come; where one cannot
  /// join, throws the same on all ranks. From then on nothing depends on the callback, and a lost
  /// rank is noticed. A process may be in any number of groups, of any of its peers, at a time.
  /// With CUDA the device is then this thread's current one; layers use it whichever is current.
  static Communicator from_callbacks(const GroupOptions& options);

  /// Collective, and makes nothing: on how many hosts the ranks of such a group are. Throws on all
  /// ranks where hosts are unequal, or their ranks do not come one after another.
  static RankLayout find_hosts(const GroupOptions& options);

  /// This process' membership in a group of CPU processes, which compute what threads compute.
  /// RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT say which, as torchrun sets them, or
  /// what srun or mpirun set; where none of them is set, the group is this process alone. Otherwise
  /// as `from_callbacks`.
  static Communicator cpu_from_environment();

  /// This process' membership in a group of one process per GPU. The environment says which, as for
  /// `cpu_from_environment` (LOCAL_RANK: the CUDA device); where it says nothing, the group is this
  /// process alone, on device 0. Waits until all ranks have come; where
  /// one does not within UNIEP_TIMEOUT_MS, or one cannot use its device, throws the same on all
  /// ranks, as where two have the same GPU without UNIEP_SHARE_DEVICE=1. The device is then this
  /// thread's current one; layers use it whichever is current. Throws Error(kUnsupported) in a
  /// build without CUDA.
  static Communicator cuda_from_environment();

  int rank() const;
  int size() const;
  Backend backend() const;
  /// The hosts that the ranks are on: as found by the kernel's boot id or UNIEP_HOST_ID, or as
  /// UNIEP_HOSTS or `cpu_group` has it.
  RankLayout layout() const;

  /// Library-internal.
  explicit Communicator(std::shared_ptr<CommunicatorImpl> impl) : impl_(std::move(impl)) {}
  const std::shared_ptr<CommunicatorImpl>& impl() const { return impl_; }

 private:
  std::shared_ptr<CommunicatorImpl> impl_;
};

/// Runs `body(communicator)` for every member of `group`, each in a thread of its own, and waits
/// for all. Where bodies throw, rethrows the error of the rank that failed first of itself, rather
/// than of one that only reports a peer's.
UNIEP_API void run_ranks(const std::vector<Communicator>& group,
                         const std::function<void(Communicator&)>& body);

}  // namespace uniep
