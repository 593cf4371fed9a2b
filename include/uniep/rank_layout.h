#pragma once

#include "uniep/macros.h"

namespace uniep {

/// The ranks of a group on equal hosts: host 0 has the first ranks, host 1 the next, and so on.
/// Within a host every rank reaches every other by memory; between hosts only ranks of the same
/// local number talk to each other: they are a rail.
struct RankLayout {
  int hosts = 1;
  int local_ranks = 1;  ///< ranks of a host

  constexpr UNIEP_HD int ranks() const { return hosts * local_ranks; }
  constexpr UNIEP_HD int host_of(int rank) const { return rank / local_ranks; }
  constexpr UNIEP_HD int local_of(int rank) const { return rank % local_ranks; }
  constexpr UNIEP_HD int rank_at(int host, int local) const { return host * local_ranks + local; }
  constexpr UNIEP_HD bool same_host(int a, int b) const { return host_of(a) == host_of(b); }

  /// Whom ranks of `host` turn to for tokens of `source`, and what goes back to it passes: the rank
  /// of its rail there; on its own host the source itself.
  constexpr UNIEP_HD int relay(int source, int host) const {
    return rank_at(host, local_of(source));
  }

  friend bool operator==(const RankLayout&, const RankLayout&) = default;
};

/// Throws Error(kInvalidArgument) where so many ranks do not make equal hosts.
UNIEP_API RankLayout layout_of_hosts(int ranks, int hosts);

}  // namespace uniep
