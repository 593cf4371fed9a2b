#pragma once

#include <string>

#include "group/tcp_meeting.h"
#include "group/tcp_messages.h"
#include "group/tcp_peers.h"

// The part of every rank but 0: it has one connection, to rank 0, the root.

namespace uniep::tcp {

/// Finds the root at the meeting's port or one above, and waits until all ranks are there.
void join_root(Peers& peers, const TcpMeeting& meeting, const Step& step);

/// An all_gather, on any other rank than 0.
Parts gather_as_member(Peers& peers, const std::string& bytes, const Step& step);

}  // namespace uniep::tcp
