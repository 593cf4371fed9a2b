#pragma once

#include <cstdint>

#include "plan/routing.h"
#include "uniep/problem.h"
#include "uniep/rank_layout.h"

// Two levels of routing: what crosses between hosts, and what the ranks of a host give each other.
// A token crosses to another host once, to the relay there (RankLayout::relay), where all of the
// host's ranks with a slot of it fetch it. Rows come back through the relay: all of them, or one
// partial sum for each combine group.

namespace uniep {

/// How ranks of several hosts exchange tokens and rows.
enum class HostWire : int {
  kDirect,  ///< every rank with the source, as on one host
  kRelayed  ///< over the relay of the source's rail
};

/// Pieces that move, by what carries them.
struct LinkCounts {
  std::int64_t own = 0;      ///< from a rank to itself
  std::int64_t nvlink = 0;   ///< between ranks of one host
  std::int64_t network = 0;  ///< between hosts

  void count(const RankLayout& layout, int from, int to) {
    ++(from == to ? own : layout.same_host(from, to) ? nvlink : network);
  }
  friend bool operator==(const LinkCounts&, const LinkCounts&) = default;
};

/// What one direction of a layer moves, of all ranks together.
struct HostTraffic {
  LinkCounts tokens;    ///< copies of tokens that dispatch fetches
  LinkCounts rows;      ///< rows that return
  LinkCounts partials;  ///< partial sums that return; own and nvlink are 0
};

/// With kRelayed, rows return to the source's relay on the host that made them, and from there
/// cross as partial sums where `sums_cross` (graph/graph.h) says so, as rows elsewhere.
HostTraffic host_traffic(const Problem& problem, const Routing& routing, const RankLayout& layout,
                         HostWire wire);

/// What goes over each kind of link, in bytes.
struct LinkBytes {
  std::int64_t own = 0, nvlink = 0, network = 0;
  friend bool operator==(const LinkBytes&, const LinkBytes&) = default;
};
LinkBytes bytes_of(const LinkCounts& counts, std::int64_t each);

/// Bytes of a partial sum of a token's rows.
std::int64_t partial_bytes(const Problem& problem);

}  // namespace uniep
