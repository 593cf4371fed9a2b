#pragma once

#include "group/tcp_meeting.h"
#include "group/tcp_peers.h"

namespace uniep::tcp {

/// Rank 0 lets all other ranks in: whoever connects hears who listens here, says who it is, and is
/// welcomed when all are here. Strangers are dropped.
void receive_ranks(Peers& peers, TcpMeeting meeting, const Step& step);

}  // namespace uniep::tcp
