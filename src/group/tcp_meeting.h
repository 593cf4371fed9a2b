#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/descriptor.h"

namespace uniep {

/// What a TcpBootstrap asks while it waits for other ranks, several times a second.
struct TcpWatch {
  std::function<void()> check{};  ///< throws where the wait is to end
  /// Why a rank will not come any more; nothing while it may.
  std::function<std::optional<std::string>(int rank)> end_of{};
};

/// The place where the ranks of a group meet.
struct TcpMeeting {
  std::string address;  ///< rank 0's
  int port = 0;
  std::uint64_t group = 0;  ///< a number that tells this group from others that meet there
  Descriptor listener{};    ///< on rank 0, where it listens there already
  TcpWatch watch{};

  /// If other programs hold the port, rank 0 takes the first free one up to this.
  int last_port() const { return std::min(port + 15, 65535); }
};

}  // namespace uniep
