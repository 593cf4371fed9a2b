#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "group/process_environment.h"
#include "group/process_watch.h"
#include "group/tcp_bootstrap.h"
#include "uniep/communicator.h"

// How processes become a group: by a callback of the caller, or by what a launcher has put into the
// environment. Either way they end up with a TcpBootstrap, and know which of them are on one host.

namespace uniep {

/// A process that has met the others of its group.
struct GroupMember {
  int rank = 0;
  int size = 1;
  int device = 0;
  bool share_device = false;
  int limit_ms = 0;
  RankLayout layout{};         ///< hosts: as found, or as UNIEP_HOSTS has it
  int ranks_of_machine = 1;    ///< of the host as found, whatever UNIEP_HOSTS says
  std::string root_address{};  ///< rank 0's, as other hosts know it; empty: there are none
  /// Null where the processes do not see each other, as those of two containers.
  std::shared_ptr<const ProcessWatch> processes{};
  std::unique_ptr<TcpBootstrap> bootstrap{};
  std::function<void()> before_rails{};  ///< of tests: called ahead of connecting to other hosts

  /// Sees those processes end.
  TcpWatch watch() const;
};

/// Collective: on how many hosts those ranks are, whatever their backend. Throws as `join_group`.
RankLayout find_hosts(const GroupOptions& options);

/// Collective. Where a rank refuses, or hosts are unequal, throws the same Error on all ranks.
GroupMember join_group(const GroupOptions& options);
GroupMember join_group(const ProcessEnvironment& environment, int limit_ms);

/// Collective, in place of `join_group` or `find_hosts`: all ranks hear what is wrong with this
/// one's options, of which `rank`, `size` and `all_gather` are read. Throws that.
[[noreturn]] void refuse_group(const GroupOptions& options, const Error& error);

/// The group of `process_environment`; this process alone where there is none.
GroupMember join_group_of_environment();

/// A group of this process alone.
GroupMember alone(int device = 0);

}  // namespace uniep
