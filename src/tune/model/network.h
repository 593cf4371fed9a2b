#pragma once

#include <algorithm>
#include <vector>

#include "plan/host_routes.h"
#include "tune/model/machine_profile.h"

namespace uniep::tune {

/// How ranks are spread over nodes. Ranks of one node talk over the profile's link, others over a
/// NIC of each rank.
struct Topology {
  int ranks_per_node = 0;  ///< 0: all on one
  double nic_bytes_per_s = 0;
  double nic_latency_s = 5e-6;
  // Seconds of a core that a message takes at each of its ends, where threads drive the network.
  double message_s = 0;
  double message_byte_s = 0;
};

/// Which ranks stand for those that are not simulated: one does for all, or those of one host do.
/// It is taken that the others do the same at the same time.
enum class StandIn { kNobody, kOneRank, kOneHost };

/// When transfers between ranks are done: every rank has an outgoing and an incoming side of its
/// link and of its NIC, each serving what it is asked for in order.
class Network {
 public:
  /// What a rank that stands for others pulls, others pull from it at the same time, and what it
  /// sends comes to it as well: its two sides carry both.
  Network(const LinkProfile& link, const Topology& topology, int ranks, StandIn stand_in)
      : link_(link),
        topology_(topology),
        stand_in_(stand_in),
        out_(2 * static_cast<std::size_t>(ranks)),
        in_(2 * static_cast<std::size_t>(ranks)) {}

  /// When a transfer's first byte leaves, and its last arrives.
  struct Transfer {
    double begun;
    double done;
  };

  /// A transfer that `self` asks for at `asked`; `rate` is that of the link, 0 for its own.
  Transfer transfer(int self, int from, int to, double bytes, double asked, double rate = 0) {
    const bool far = topology_.ranks_per_node > 0 &&
                     from / topology_.ranks_per_node != to / topology_.ranks_per_node;
    // A machine without a link of its own still reaches other nodes over its NIC.
    (from == to ? bytes_.own
     : far      ? bytes_.network
                : bytes_.nvlink) += static_cast<std::int64_t>(bytes);
    if (from == to || (!far && link_.bytes_per_s == 0)) return {asked, asked};
    const double speed = far ? topology_.nic_bytes_per_s : (rate > 0 ? rate : link_.bytes_per_s);
    const double latency = far ? topology_.nic_latency_s : link_.latency_s;
    const double seconds = bytes / speed;
    const bool mirrored = stand_in_ == StandIn::kOneRank || (stand_in_ == StandIn::kOneHost && far);
    double& out = out_[side(mirrored ? self : from, far)];
    double& in = mirrored ? out : in_[side(to, far)];
    const double done = occupy(out, in, asked, seconds);
    return {done - seconds, done + latency};
  }

  /// The bytes of all transfers so far.
  const LinkBytes& bytes() const { return bytes_; }

 private:
  static std::size_t side(int rank, bool far) {
    return 2 * static_cast<std::size_t>(rank) + (far ? 1 : 0);
  }

  double occupy(double& out, double& in, double asked, double seconds) const {
    if (link_.exclusive) {
      out = in = std::max({asked, out, in}) + seconds;
      return out;
    }
    out = std::max(asked, out) + seconds;
    if (&in != &out) in = std::max(asked, in) + seconds;
    return std::max(out, in);
  }

  const LinkProfile& link_;
  const Topology& topology_;
  const StandIn stand_in_;
  std::vector<double> out_;  // when each is free
  std::vector<double> in_;
  LinkBytes bytes_;
};

}  // namespace uniep::tune
