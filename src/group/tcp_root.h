#pragma once

#include <optional>
#include <string>
#include <vector>

#include "group/tcp_messages.h"
#include "group/tcp_peers.h"

// Rank 0's part: all that ranks exchange goes through it, so that one rank sees every loss.

namespace uniep::tcp {

/// Parts that have come so far, by rank.
using Gathered = std::vector<std::optional<std::string>>;

/// An all_gather, on rank 0.
Parts gather_as_root(Peers& peers, const std::string& bytes, const Step& step);

/// Takes what members have sent: parts, reports of failure, and the question who is missing, whose
/// askers it returns. `parts` is null while ranks join.
std::vector<Connection*> read_members(Peers& peers, const Step& step, Gathered* parts);

/// Members whose limit has passed hear who is missing, as all others do, or that nobody is.
void answer(Peers& peers, const std::vector<Connection*>& asking, const Step& step,
            const RollCall& roll);

}  // namespace uniep::tcp
