#pragma once

#include <cstdint>
#include <memory>

#include "group/process_environment.h"
#include "group/process_watch.h"
#include "group/tcp_bootstrap.h"
#include "uniep/communicator.h"

// How processes become a group: by a callback of the caller, or by what a launcher has put into the
// environment. Either way they end up with a TcpBootstrap, and know that they are on one host.

namespace uniep {

/// A process that has met the others of its group.
struct GroupMember {
  int rank = 0;
  int size = 1;
  int device = 0;
  bool share_device = false;
  int limit_ms = 0;
  /// Null where the processes do not see each other, as those of two containers.
  std::shared_ptr<const ProcessWatch> processes{};
  std::unique_ptr<TcpBootstrap> bootstrap{};
};

/// Collective. Where a rank refuses, or is of another host, throws the same Error on all ranks.
GroupMember join_group(const GroupOptions& options);
GroupMember join_group(const ProcessEnvironment& environment, int limit_ms);

/// The group of `process_environment`; this process alone where there is none.
GroupMember join_group_of_environment();

/// A number that no other group has.
std::uint64_t random_number();

/// A group of this process alone.
GroupMember alone(int device = 0);

}  // namespace uniep
