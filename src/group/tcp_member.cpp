#include "group/tcp_member.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "base/check.h"
#include "group/tcp_socket.h"

namespace uniep::tcp {
namespace {

/// How long a program at the root's port may take to greet before the next port is tried.
constexpr std::chrono::milliseconds kGreetingTime(300);
/// How long a member whose limit has passed waits for the root to say who is missing.
constexpr std::chrono::milliseconds kAnswerTime(500);
constexpr std::chrono::milliseconds kFirstPause(5);
constexpr std::chrono::milliseconds kLongestPause(100);

/// The greeting of who listens there; nothing where it says anything else.
std::optional<Greeting> greeting_from(Connection& c, Deadline until) {
  while (c.received().empty() && !c.ended() && !until.expired()) pump({&c}, until);
  const auto frame = c.take();
  if (!frame || frame->kind != FrameKind::kGreeting) return std::nullopt;
  return from_bytes<Greeting>(frame->payload);
}

/// Connects to who listens at port `at`; returns whether it is this group's root.
bool try_root(Peers& peers, const TcpMeeting& meeting, int at, Deadline until) {
  const std::string& address = meeting.address;
  Connection c(connect_to(address, at, until));
  if (!c.open()) return false;
  const auto greeting = greeting_from(c, until);
  if (!greeting || greeting->port != meeting.port) return false;
  require(greeting->protocol == kProtocol, ErrorCode::kInvalidArgument, "rank 0 at ", address, ":",
          at, " speaks version ", greeting->protocol, " of the protocol and this rank version ",
          kProtocol, "; the same build of uniep on all ranks is accepted");
  if (greeting->group != meeting.group) return false;
  require(greeting->size == peers.size(), ErrorCode::kInvalidArgument, "WORLD_SIZE is ",
          peers.size(), " on rank ", peers.rank(), " and ", greeting->size, " on rank 0 at ",
          address, ":", at, "; the same on all ranks is accepted");
  peers.to(0) = std::move(c);
  return true;
}

bool try_ports(Peers& peers, const TcpMeeting& meeting, const Step& step) {
  for (int at = meeting.port; at <= meeting.last_port(); ++at) {
    const Deadline until = std::min(step.deadline, Deadline::in(kGreetingTime));
    if (try_root(peers, meeting, at, until)) return true;
  }
  return false;
}

void find_root(Peers& peers, const TcpMeeting& meeting, const Step& step) {
  auto pause = kFirstPause;
  while (!try_ports(peers, meeting, step)) {
    if (step.deadline.expired()) peers.give_up_on(0, step, 1);
    if (peers.end_of(0)) peers.lost(0, &step);
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPause);
  }
}

/// What the root has sent, unless it ends the group or turns this rank away.
std::optional<Frame> take_from_root(Peers& peers, const Step& step) {
  auto frame = peers.to(0).take();
  if (!frame) return std::nullopt;
  if (frame->kind == FrameKind::kVerdict) peers.hear_verdict(frame->payload, &step);
  require(frame->kind != FrameKind::kRefused, ErrorCode::kInvalidArgument, frame->payload);
  return frame;
}

/// Waits for the root's answer. When the limit passes the root is asked who is missing; only where
/// it does not answer either, it is the one to be named.
Frame await(Peers& peers, FrameKind kind, const Step& step) {
  Connection& root = peers.to(0);
  Deadline until = step.deadline;
  bool asked = false;
  for (;;) {
    while (auto frame = take_from_root(peers, step)) {
      if (frame->kind == kind) return std::move(*frame);
      if (frame->kind == FrameKind::kWorking) {
        until = step.renewed();
        asked = false;
      }
    }
    if (root.ended() || peers.is_gone(0)) peers.lost(0, &step);
    if (peers.pump({&root}, until)) {
      // Data is under way, in either direction, or has come.
      if (root.receiving() || root.sending()) until = step.renewed();
    } else if (until.expired()) {
      if (asked) peers.give_up_on(0, step, 1);
      root.send(FrameKind::kExpired, to_bytes(step.round));
      asked = true;
      until = Deadline::in(kAnswerTime);
    }
  }
}

}  // namespace

void join_root(Peers& peers, const TcpMeeting& meeting, const Step& step) {
  find_root(peers, meeting, step);
  Connection& root = peers.to(0);
  root.trust();
  root.send(FrameKind::kHello, to_bytes(Hello{kProtocol, peers.size(), peers.rank()}));
  await(peers, FrameKind::kWelcome, step);
}

Parts gather_as_member(Peers& peers, const std::string& bytes, const Step& step) {
  // Not a copy: nothing is sent any more once this call has ended, be it by a throw.
  peers.to(0).send(FrameKind::kPart,
                   std::shared_ptr<const std::string>(std::shared_ptr<void>(), &bytes));
  return unpack(await(peers, FrameKind::kResult, step).payload, peers.size());
}

}  // namespace uniep::tcp
