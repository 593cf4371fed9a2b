#include "group/tcp_bootstrap.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>

#include "base/check.h"
#include "group/wait_error.h"

namespace uniep {
namespace {

using tcp::Clock;
using tcp::Connection;
using tcp::Frame;
using tcp::FrameKind;

constexpr std::uint32_t kProtocol = 2;
constexpr int kPorts = 16;
/// How long a program at the root's port may take to greet before the next port is tried.
constexpr std::chrono::milliseconds kGreetingTime(300);
/// How long a member whose limit has passed waits for the root to say who is missing.
constexpr std::chrono::milliseconds kAnswerTime(500);
/// How long a failed rank tries to tell the others.
constexpr std::chrono::milliseconds kFarewellTime(300);
/// How long ranks that join may come after one that ended while they did.
constexpr std::chrono::milliseconds kLateTime(2000);
/// How long a process whose connection has ended may take to end itself.
constexpr std::chrono::milliseconds kEndTime(200);
/// Between questions to the watch.
constexpr std::chrono::milliseconds kWatchTime(20);

struct Greeting {
  std::uint32_t protocol;
  std::int32_t size;
  std::int32_t port;  // MASTER_PORT: two groups that met on neighbouring ports are told apart
  std::uint32_t unused;
  std::uint64_t group;
};

struct Hello {
  std::uint32_t protocol;
  std::int32_t size;
  std::int32_t rank;
};

struct Verdict {
  std::int32_t code;
  std::int32_t failed_rank;
  std::int32_t missing_rank;  // kTimeout
  std::int32_t present;       // kTimeout
};

template <class T>
std::string to_bytes(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

/// The value at the front of a payload; nothing where the payload is too short.
template <class T>
std::optional<T> from_bytes(const std::string& bytes) {
  if (bytes.size() < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

std::string pack(const std::vector<std::string>& parts) {
  std::string all;
  std::size_t bytes = 0;
  for (const std::string& p : parts) bytes += sizeof(std::uint64_t) + p.size();
  all.reserve(bytes);
  for (const std::string& p : parts) all += to_bytes<std::uint64_t>(p.size());
  for (const std::string& p : parts) all += p;
  return all;
}

std::vector<std::string> unpack(const std::string& all, int count) {
  std::vector<std::string> parts;
  std::size_t at = static_cast<std::size_t>(count) * sizeof(std::uint64_t);
  for (int r = 0; r < count; ++r) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, all.data() + static_cast<std::size_t>(r) * sizeof(bytes), sizeof(bytes));
    parts.push_back(all.substr(at, bytes));
    at += bytes;
  }
  return parts;
}

int count(const std::vector<bool>& here) {
  return static_cast<int>(std::count(here.begin(), here.end(), true));
}

/// The size of `here` where nobody is missing.
int first_missing(const std::vector<bool>& here) {
  return static_cast<int>(std::find(here.begin(), here.end(), false) - here.begin());
}

std::optional<Frame> take(Connection& from) {
  if (from.received().empty()) return std::nullopt;
  Frame frame = std::move(from.received().front());
  from.received().pop_front();
  return frame;
}

/// The next frame that comes before `until`.
std::optional<Frame> wait_for_frame(Connection& from, Clock::time_point until) {
  while (from.received().empty() && !from.ended() && Clock::now() < until) {
    tcp::pump({&from}, until);
  }
  return take(from);
}

}  // namespace

TcpBootstrap::TcpBootstrap(int rank, int size, TcpMeeting meeting, int limit_ms)
    : rank_(rank),
      size_(size),
      watch_(std::move(meeting.watch)),
      connections_(static_cast<std::size_t>(rank == 0 ? size : 1)) {
  if (size == 1) return;
  const Step step{.stage = "connect", .limit_ms = limit_ms};
  if (rank == 0) {
    accept_ranks(std::move(meeting), step);
  } else {
    join(meeting, step);
  }
}

TcpBootstrap::~TcpBootstrap() {
  if (!failure_.raised() && std::uncaught_exceptions() == 0) tell(FrameKind::kBye, "");
}

std::vector<Connection*> TcpBootstrap::all_connections() {
  std::vector<Connection*> all;
  for (Connection& c : connections_) {
    if (c.open()) all.push_back(&c);
  }
  return all;
}

// ---- Joining ----

void TcpBootstrap::accept_ranks(TcpMeeting meeting, const Step& step) {
  tcp::Descriptor& listener = meeting.listener;
  const int last = std::min(meeting.port + kPorts - 1, 65535);
  for (int at = meeting.port; at <= last && !listener.valid(); ++at) {
    listener = tcp::listen_at(meeting.address, at);
  }
  require(listener.valid(), ErrorCode::kInvalidArgument, "rank 0 cannot listen: the ports ",
          meeting.port, " to ", last, " of MASTER_ADDR ", meeting.address,
          " are all taken; a MASTER_PORT that is free is accepted");

  std::vector<Connection> visitors;
  const auto limit = step.begin + step.limit();
  // The first rank that ended before all had joined. Who still comes is let in, to hear of it.
  std::optional<int> first_lost;
  auto last_welcome = limit;
  const auto joined = [&] {
    std::vector<bool> here(static_cast<std::size_t>(size_), true);
    for (int r = 1; r < size_; ++r) {
      Connection& c = connections_[static_cast<std::size_t>(r)];
      const bool ended = c.open() ? c.ended() : watch_.end_of && watch_.end_of(r);
      if (ended && !first_lost) {
        first_lost = r;
        last_welcome = std::min(limit, Clock::now() + kLateTime);
      }
      here[static_cast<std::size_t>(r)] = c.open() || ended;
    }
    return here;
  };
  for (;;) {
    const std::vector<bool> here = joined();
    const int missing = first_missing(here);
    if (first_lost && (missing == size_ || Clock::now() >= last_welcome)) {
      lost(*first_lost, "in stage connect");
    }
    if (missing == size_) break;
    if (Clock::now() >= limit) fail(missing_error(step, missing, count(here)), missing);
    std::vector<Connection*> all = all_connections();
    for (Connection& v : visitors) all.push_back(&v);
    pump(all, last_welcome, listener.get());
    greet_visitors(meeting, visitors);
    const std::vector<Connection*> asking = read_members(nullptr);
    answer(asking, step, joined());  // who has just come counts
  }
  tell(FrameKind::kWelcome, "");
}

/// Greets who has just come, and admits those who have answered; whoever has left or talks
/// otherwise is dropped.
void TcpBootstrap::greet_visitors(const TcpMeeting& meeting, std::vector<Connection>& visitors) {
  const Greeting greeting{kProtocol, size_, meeting.port, 0, meeting.group};
  for (tcp::Descriptor fd = tcp::accept_from(meeting.listener); fd.valid();
       fd = tcp::accept_from(meeting.listener)) {
    Connection& visitor = visitors.emplace_back(std::move(fd));
    visitor.send(FrameKind::kGreeting, to_bytes(greeting));
    visitor.write_some();
  }
  for (Connection& visitor : visitors) {
    if (!visitor.received().empty()) admit(visitor);
  }
  std::erase_if(visitors, [](const Connection& v) { return !v.open() || v.ended(); });
}

void TcpBootstrap::admit(Connection& visitor) {
  const Frame frame = *take(visitor);
  const auto hello = from_bytes<Hello>(frame.payload);
  const bool fits = frame.kind == FrameKind::kHello && hello && hello->protocol == kProtocol &&
                    hello->size == size_ && hello->rank > 0 && hello->rank < size_;
  if (!fits) {
    visitor = Connection();
    return;
  }
  Connection& place = connections_[static_cast<std::size_t>(hello->rank)];
  if (place.open()) {
    visitor.send(FrameKind::kRefused,
                 cat("rank ", hello->rank, " has joined the group already; each RANK from 0 to ",
                     size_ - 1, " is accepted once"));
    visitor.write_some();
    visitor = Connection();
    return;
  }
  place = std::move(visitor);
  place.trust();
  visitor = Connection();
}

void TcpBootstrap::join(const TcpMeeting& meeting, const Step& step) {
  const auto limit = step.begin + step.limit();
  auto pause = std::chrono::milliseconds(5);
  bool found = false;
  while (!found) {
    const int last = std::min(meeting.port + kPorts - 1, 65535);
    for (int at = meeting.port; at <= last && !found; ++at) {
      found = try_root(meeting, at, std::min(limit, Clock::now() + kGreetingTime));
    }
    if (found) break;
    if (Clock::now() >= limit) fail(missing_error(step, 0, 1), 0);
    if (watch_.end_of && watch_.end_of(0)) lost(0, "in stage connect");
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(100));
  }
  root().trust();
  root().send(FrameKind::kHello, to_bytes(Hello{kProtocol, size_, rank_}));
  await(FrameKind::kWelcome, step);
}

/// Connects to who listens at port `at`; returns whether it is this group's root.
bool TcpBootstrap::try_root(const TcpMeeting& meeting, int at, Clock::time_point until) {
  const std::string& address = meeting.address;
  Connection c(tcp::connect_to(address, at, until));
  if (!c.open()) return false;
  const auto frame = wait_for_frame(c, until);
  if (!frame || frame->kind != FrameKind::kGreeting) return false;
  const auto greeting = from_bytes<Greeting>(frame->payload);
  if (!greeting || greeting->port != meeting.port) return false;
  require(greeting->protocol == kProtocol, ErrorCode::kInvalidArgument, "rank 0 at ", address, ":",
          at, " speaks version ", greeting->protocol, " of the protocol and this rank version ",
          kProtocol, "; the same build of uniep on all ranks is accepted");
  if (greeting->group != meeting.group) return false;
  require(greeting->size == size_, ErrorCode::kInvalidArgument, "WORLD_SIZE is ", size_,
          " on rank ", rank_, " and ", greeting->size, " on rank 0 at ", address, ":", at,
          "; the same on all ranks is accepted");
  root() = std::move(c);
  return true;
}

// ---- all_gather ----

bool TcpBootstrap::pump(const std::vector<Connection*>& connections, Clock::time_point until,
                        int also) {
  if (!watch_.check && !watch_.end_of) return tcp::pump(connections, until, also);
  if (watch_.check) watch_.check();
  return tcp::pump(connections, std::min(until, Clock::now() + kWatchTime), also);
}

std::vector<std::string> TcpBootstrap::all_gather(const std::string& bytes, const char* stage,
                                                  int limit_ms) {
  failure_.check();
  if (size_ == 1) return {bytes};
  ++round_;
  const Step step{.stage = stage, .limit_ms = limit_ms};
  try {
    return rank_ == 0 ? gather_as_root(bytes, step) : gather_as_member(bytes, step);
  } catch (const std::exception& e) {
    // Whatever it was, the ranks are no longer in step, and nothing must be sent any more.
    failure_.raise(rank_, e.what());
    throw;
  }
}

TcpBootstrap::Parts TcpBootstrap::gather_as_root(const std::string& bytes, const Step& step) {
  Parts parts = collect(bytes, step);
  deliver(parts, step);
  return parts;
}

TcpBootstrap::Parts TcpBootstrap::gather_as_member(const std::string& bytes, const Step& step) {
  // Not a copy: nothing is sent any more once this call has ended, be it by a throw.
  root().send(FrameKind::kPart,
              std::shared_ptr<const std::string>(std::shared_ptr<void>(), &bytes));
  return unpack(await(FrameKind::kResult, step).payload, size_);
}

/// Takes what members have sent: parts, reports of failure, and the question who is missing, whose
/// askers it returns.
std::vector<Connection*> TcpBootstrap::read_members(Gathered* parts) {
  std::vector<Connection*> asking;
  for (std::size_t r = 1; r < connections_.size(); ++r) {
    while (auto frame = take(connections_[r])) {
      if (frame->kind == FrameKind::kVerdict) hear_verdict(frame->payload, nullptr);
      if (frame->kind == FrameKind::kPart && parts != nullptr) {
        (*parts)[r] = std::move(frame->payload);
      }
      // A question of an earlier round has crossed that round's result.
      if (frame->kind == FrameKind::kExpired &&
          from_bytes<std::uint64_t>(frame->payload) == round_) {
        asking.push_back(&connections_[r]);
      }
    }
  }
  return asking;
}

/// Members whose limit has passed hear who is missing, as all others do, or that nobody is.
void TcpBootstrap::answer(const std::vector<Connection*>& asking, const Step& step,
                          const std::vector<bool>& here) {
  const int missing = first_missing(here);
  if (!asking.empty() && missing < size_) {
    fail(missing_error(step, missing, count(here)), missing);
  }
  for (Connection* member : asking) member->send(FrameKind::kWorking);
}

TcpBootstrap::Parts TcpBootstrap::collect(const std::string& bytes, const Step& step) {
  Gathered parts(static_cast<std::size_t>(size_));
  parts[0] = bytes;
  auto last_move = step.begin;
  for (;;) {
    // A part that is under way has come, as far as the time limit is concerned.
    const auto come = [&](bool or_coming) {
      std::vector<bool> here;
      for (std::size_t r = 0; r < parts.size(); ++r) {
        here.push_back(parts[r].has_value() || (or_coming && connections_[r].receiving()));
      }
      return here;
    };
    const std::vector<Connection*> asking = read_members(&parts);
    const std::vector<bool> complete = come(false);
    const std::vector<bool> coming = come(true);
    answer(asking, step, coming);
    for (int r = 1; r < size_; ++r) {
      const auto at = static_cast<std::size_t>(r);
      if (connections_[at].ended() || (!complete[at] && is_gone(r, connections_[at]))) {
        lost(r, cat("in stage ", step.stage));
      }
    }
    if (first_missing(complete) == size_) break;

    const bool all_coming = first_missing(coming) == size_;
    const auto until = (all_coming ? last_move : step.begin) + step.limit();
    if (pump(all_connections(), until)) {
      last_move = Clock::now();
    } else if (Clock::now() >= until) {
      const std::vector<bool>& here = all_coming ? complete : coming;
      fail(missing_error(step, first_missing(here), count(here)), first_missing(here));
    }
  }
  Parts all;
  for (auto& part : parts) all.push_back(std::move(*part));
  return all;
}

void TcpBootstrap::deliver(const Parts& parts, const Step& step) {
  const auto result = std::make_shared<const std::string>(pack(parts));
  for (Connection* c : all_connections()) {
    c->send(FrameKind::kResult, result);
    c->write_some();
  }
  auto last_move = Clock::now();
  for (;;) {
    int waiting_for = 0;
    for (int r = 1; r < size_; ++r) {
      const Connection& c = connections_[static_cast<std::size_t>(r)];
      if (c.undeliverable()) lost(r, cat("in stage ", step.stage));
      if (c.sending() && waiting_for == 0) waiting_for = r;
    }
    if (waiting_for == 0) return;
    const auto until = last_move + step.limit();
    if (pump(all_connections(), until)) {
      last_move = Clock::now();
    } else if (Clock::now() >= until) {
      fail(missing_error(step, waiting_for, size_), waiting_for);
    }
  }
}

/// Waits for the root's answer. When the limit passes the root is asked who is missing; only where
/// it does not answer either, it is the one to be named.
Frame TcpBootstrap::await(FrameKind kind, const Step& step) {
  auto until = step.begin + step.limit();
  bool asked = false;
  for (;;) {
    while (auto frame = take(root())) {
      if (frame->kind == kind) return std::move(*frame);
      if (frame->kind == FrameKind::kVerdict) hear_verdict(frame->payload, &step);
      require(frame->kind != FrameKind::kRefused, ErrorCode::kInvalidArgument, frame->payload);
      if (frame->kind == FrameKind::kWorking) {
        until = Clock::now() + step.limit();
        asked = false;
      }
    }
    if (root().ended() || is_gone(0, root())) lost(0, cat("in stage ", step.stage));
    if (pump({&root()}, until)) {
      // Data is under way, in either direction, or has come.
      if (root().receiving() || root().sending()) until = Clock::now() + step.limit();
    } else if (Clock::now() >= until) {
      if (asked) fail(missing_error(step, 0, 1), 0);
      root().send(FrameKind::kExpired, to_bytes(round_));
      asked = true;
      until = Clock::now() + kAnswerTime;
    }
  }
}

void TcpBootstrap::check() {
  failure_.check();
  for (std::size_t i = 0; i < connections_.size(); ++i) {
    Connection& c = connections_[i];
    if (!c.open()) continue;
    c.read_some();
    bool left = false;
    for (const Frame& frame : c.received()) {
      if (frame.kind == FrameKind::kVerdict) hear_verdict(std::string(frame.payload), nullptr);
      left |= frame.kind == FrameKind::kBye;
    }
    if (c.ended() && !left) lost(static_cast<int>(i), "");
  }
}

// ---- Failing ----

/// Where a process that has ended forked others, its connections stay open.
bool TcpBootstrap::is_gone(int rank, Connection& connection) const {
  return watch_.end_of && watch_.end_of(rank) && !connection.read_some();
}

Error TcpBootstrap::missing_error(const Step& step, int peer, int present) const {
  return wait_error({.rank = rank_,
                     .stage = step.stage,
                     .tile = -1,
                     .peer = peer,
                     .expected = static_cast<std::uint64_t>(size_),
                     .seen = static_cast<std::uint64_t>(present),
                     .limit_ms = step.limit_ms},
                    "ranks present");
}

void TcpBootstrap::tell(FrameKind kind, const std::string& payload) {
  const auto shared = std::make_shared<const std::string>(payload);
  const std::vector<Connection*> all = all_connections();
  for (Connection* c : all) {
    c->send(kind, shared);
    c->write_some();
  }
  const auto until = Clock::now() + kFarewellTime;
  const auto unsent = [](const Connection* c) { return c->sending() && !c->ended(); };
  while (std::any_of(all.begin(), all.end(), unsent) && Clock::now() < until) {
    tcp::pump(all, until);
  }
}

void TcpBootstrap::fail(const Error& error, int failed_rank) {
  const bool timeout = error.wait().has_value();
  const Verdict verdict{.code = static_cast<std::int32_t>(error.code()),
                        .failed_rank = failed_rank,
                        .missing_rank = timeout ? error.wait()->peer : -1,
                        .present = timeout ? static_cast<std::int32_t>(error.wait()->seen) : 0};
  tell(FrameKind::kVerdict, to_bytes(verdict) + error.what());
  failure_.raise(timeout ? rank_ : failed_rank, error.what());
  throw error;
}

void TcpBootstrap::abandon(const std::string& sentence) {
  if (failure_.raised()) return;
  try {
    fail(Error(ErrorCode::kPeerFailed, cat("rank ", rank_, ": ", sentence)), rank_);
  } catch (const Error&) {
    // Is for the others: here somebody knows already.
  }
}

/// A process that ends closes its connections some time before others can see that it has ended.
std::optional<std::string> TcpBootstrap::end_of(int rank) const {
  if (!watch_.end_of) return std::nullopt;
  auto end = watch_.end_of(rank);
  for (const auto until = Clock::now() + kEndTime; !end && Clock::now() < until;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    end = watch_.end_of(rank);
  }
  return end;
}

void TcpBootstrap::lost(int rank, const std::string& when) {
  // A member hears of others' ends from the root, which may have said so before it ended itself.
  Connection& c = connections_[static_cast<std::size_t>(rank_ == 0 ? rank : 0)];
  while (const auto frame = take(c)) {
    if (frame->kind == FrameKind::kVerdict) hear_verdict(frame->payload, nullptr);
  }
  if (watch_.check) watch_.check();
  const std::string unknown =
      cat("rank ", rank, " is gone: its process ended or closed its connection",
          when.empty() ? "" : " ", when);
  fail(Error(ErrorCode::kPeerFailed, end_of(rank).value_or(unknown)), rank);
}

/// `step`: what this rank waits for; null where it has not begun to wait.
void TcpBootstrap::hear_verdict(const std::string& payload, const Step* step) {
  const auto verdict = from_bytes<Verdict>(payload);
  ensure(verdict.has_value(), "a verdict of ", payload.size(), " bytes");
  const std::string sentence = payload.substr(sizeof(Verdict));
  const bool timeout = verdict->code == static_cast<std::int32_t>(ErrorCode::kTimeout);
  if (timeout && step != nullptr && verdict->missing_rank != rank_) {
    const Error error = missing_error(*step, verdict->missing_rank, verdict->present);
    failure_.raise(rank_, error.what());
    throw error;
  }
  if (!timeout) {
    const Error error(static_cast<ErrorCode>(verdict->code), sentence);
    if (rank_ == 0) fail(error, verdict->failed_rank);
    failure_.raise(verdict->failed_rank, sentence);
    throw error;
  }
  // Others have given up on a rank that comes late: this one, or the root.
  const Error error(ErrorCode::kPeerFailed, "the group is unusable: " + sentence);
  if (rank_ == 0) fail(error, verdict->failed_rank);
  failure_.raise(verdict->failed_rank, sentence);
  throw error;
}

int free_tcp_port() { return tcp::port_of(tcp::listen_at_loopback()); }

}  // namespace uniep
