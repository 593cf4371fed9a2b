#include "group/tcp_reception.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "group/tcp_messages.h"
#include "group/tcp_root.h"
#include "group/tcp_socket.h"

namespace uniep::tcp {
namespace {

/// How long ranks that join may come after one that ended while they did.
constexpr std::chrono::milliseconds kLateTime(2000);

Descriptor listener_of(TcpMeeting& meeting) {
  Descriptor listener = std::move(meeting.listener);
  const int last = meeting.last_port();
  for (int at = meeting.port; at <= last && !listener.valid(); ++at) {
    listener = listen_at(meeting.address, at);
  }
  require(listener.valid(), ErrorCode::kInvalidArgument, "rank 0 cannot listen: the ports ",
          meeting.port, " to ", last, " of MASTER_ADDR ", meeting.address,
          " are all taken; a MASTER_PORT that is free is accepted");
  return listener;
}

class Reception {
 public:
  Reception(Peers& peers, TcpMeeting meeting, const Step& step)
      : peers_(peers),
        step_(step),
        listener_(listener_of(meeting)),
        greeting_{kProtocol, peers.size(), meeting.port, 0, meeting.group} {}

  void run() {
    while (!all_joined()) {
      std::vector<Connection*> all = peers_.connections();
      for (Connection& v : visitors_) all.push_back(&v);
      peers_.pump(all, last_welcome_, listener_.get());
      greet_visitors();
      const std::vector<Connection*> asking = read_members(peers_, step_, nullptr);
      answer(peers_, asking, step_, call_roll());  // who has just come counts
    }
    peers_.tell(FrameKind::kWelcome, "");
  }

 private:
  /// Throws where a rank has ended or not come in time.
  bool all_joined() {
    const RollCall roll = call_roll();
    if (first_lost_ && (roll.complete() || last_welcome_.expired())) {
      peers_.lost(*first_lost_, &step_);
    }
    if (roll.complete()) return true;
    if (step_.deadline.expired()) peers_.give_up_on_missing(step_, roll);
    return false;
  }

  /// A rank that has ended need not be waited for.
  RollCall call_roll() {
    RollCall roll{std::vector<bool>(static_cast<std::size_t>(peers_.size()), true)};
    for (int r = 1; r < peers_.size(); ++r) {
      const Connection& c = peers_.to(r);
      const bool ended = c.open() ? c.ended() : peers_.end_of(r).has_value();
      if (ended) note_lost(r);
      roll.here[static_cast<std::size_t>(r)] = c.open() || ended;
    }
    return roll;
  }

  void note_lost(int rank) {
    if (first_lost_) return;
    first_lost_ = rank;
    last_welcome_ = std::min(step_.deadline, Deadline::in(kLateTime));
  }

  /// Greets who has just come, and admits those who have answered; whoever has left or talks
  /// otherwise is dropped.
  void greet_visitors() {
    for (Descriptor fd = next_visitor(); fd.valid(); fd = next_visitor()) {
      Connection& visitor = visitors_.emplace_back(std::move(fd));
      visitor.send(FrameKind::kGreeting, to_bytes(greeting_));
      visitor.write_some();
    }
    for (Connection& visitor : visitors_) {
      if (const auto frame = visitor.take()) admit(*frame, std::exchange(visitor, Connection()));
    }
    std::erase_if(visitors_, [](const Connection& v) { return !v.open() || v.ended(); });
  }

  Descriptor next_visitor() {
    try {
      return accept_from(listener_);
    } catch (const Error& error) {
      peers_.fail(error, 0);  // tells who is in
    }
  }

  void admit(const Frame& frame, Connection visitor) {
    const auto hello = from_bytes<Hello>(frame.payload);
    const bool fits = frame.kind == FrameKind::kHello && hello && hello->protocol == kProtocol &&
                      hello->size == peers_.size() && hello->rank > 0 &&
                      hello->rank < peers_.size();
    if (!fits) return;
    Connection& place = peers_.to(hello->rank);
    if (place.open()) {
      refuse(visitor, hello->rank);
      return;
    }
    place = std::move(visitor);
    place.trust();
  }

  void refuse(Connection& visitor, int rank) const {
    visitor.send(FrameKind::kRefused,
                 cat("rank ", rank, " has joined the group already; each RANK from 0 to ",
                     peers_.size() - 1, " is accepted once"));
    visitor.write_some();
  }

  Peers& peers_;
  const Step& step_;
  const Descriptor listener_;
  const Greeting greeting_;
  std::vector<Connection> visitors_;
  /// The first rank that ended before all had joined. Who still comes is let in, to hear of it.
  std::optional<int> first_lost_;
  Deadline last_welcome_ = step_.deadline;
};

}  // namespace

void receive_ranks(Peers& peers, TcpMeeting meeting, const Step& step) {
  Reception(peers, std::move(meeting), step).run();
}

}  // namespace uniep::tcp
