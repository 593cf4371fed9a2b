#include "group/tcp_peers.h"

#include <algorithm>
#include <memory>
#include <thread>

#include "base/check.h"
#include "base/wait_error.h"
#include "group/tcp_messages.h"

namespace uniep::tcp {
namespace {

/// How long a failed rank tries to tell the others.
constexpr std::chrono::milliseconds kFarewellTime(300);
/// How long a process whose connection has ended may take to end itself.
constexpr std::chrono::milliseconds kEndTime(200);
/// Between questions to the watch.
constexpr std::chrono::milliseconds kWatchTime(20);

}  // namespace

int RollCall::present() const {
  return static_cast<int>(std::count(here.begin(), here.end(), true));
}

int RollCall::first_missing() const {
  return static_cast<int>(std::find(here.begin(), here.end(), false) - here.begin());
}

Peers::Peers(int rank, int size, TcpWatch watch)
    : rank_(rank),
      size_(size),
      watch_(std::move(watch)),
      connections_(static_cast<std::size_t>(rank == 0 ? size : 1)) {}

std::vector<Connection*> Peers::connections() {
  std::vector<Connection*> all;
  for (Connection& c : connections_) {
    if (c.open()) all.push_back(&c);
  }
  return all;
}

bool Peers::pump(const std::vector<Connection*>& connections, Deadline until, int also) {
  if (!watch_.check && !watch_.end_of) return tcp::pump(connections, until, also);
  if (watch_.check) watch_.check();
  return tcp::pump(connections, std::min(until, Deadline::in(kWatchTime)), also);
}

void Peers::tell(FrameKind kind, const std::string& payload) {
  const auto shared = std::make_shared<const std::string>(payload);
  const std::vector<Connection*> all = connections();
  for (Connection* c : all) {
    c->send(kind, shared);
    c->write_some();
  }
  const Deadline until = Deadline::in(kFarewellTime);
  const auto unsent = [](const Connection* c) { return c->sending() && !c->ended(); };
  while (std::any_of(all.begin(), all.end(), unsent) && !until.expired()) tcp::pump(all, until);
}

std::optional<std::string> Peers::end_of(int rank) const {
  return watch_.end_of ? watch_.end_of(rank) : std::nullopt;
}

/// Whether its process has ended and nothing more comes. Its connection may be open: it stays so if
/// the process forked others.
bool Peers::is_gone(int rank) { return end_of(rank) && !to(rank).read_some(); }

void Peers::check() {
  failure_.check();
  for (std::size_t r = 0; r < connections_.size(); ++r) {
    Connection& c = connections_[r];
    if (!c.open()) continue;
    c.read_some();
    bool left = false;
    for (const Frame& frame : c.received()) {
      if (frame.kind == FrameKind::kVerdict) hear_verdict(std::string(frame.payload), nullptr);
      left |= frame.kind == FrameKind::kBye;
    }
    if (c.ended() && !left) lost(static_cast<int>(r), nullptr);
  }
}

void Peers::fail(const Error& error, int failed_rank) {
  const bool timeout = error.wait().has_value();
  const Verdict verdict{.code = static_cast<std::int32_t>(error.code()),
                        .failed_rank = failed_rank,
                        .missing_rank = timeout ? error.wait()->peer : -1,
                        .present = timeout ? static_cast<std::int32_t>(error.wait()->seen) : 0};
  tell(FrameKind::kVerdict, to_bytes(verdict) + error.what());
  failure_.raise(timeout ? rank_ : failed_rank, error.what());
  throw error;
}

Error Peers::missing_error(const Step& step, int peer, int present) const {
  return wait_error({.rank = rank_,
                     .stage = step.stage,
                     .tile = -1,
                     .peer = peer,
                     .expected = static_cast<std::uint64_t>(size_),
                     .seen = static_cast<std::uint64_t>(present),
                     .limit_ms = step.limit_ms},
                    "ranks present");
}

void Peers::give_up_on(int rank, const Step& step, int present) {
  fail(missing_error(step, rank, present), rank);
}

void Peers::give_up_on_missing(const Step& step, const RollCall& roll) {
  give_up_on(roll.first_missing(), step, roll.present());
}

/// A process that ends closes its connections some time before others can see that it has ended.
std::optional<std::string> Peers::await_end(int rank) const {
  if (!watch_.end_of) return std::nullopt;
  auto end = watch_.end_of(rank);
  for (const Deadline until = Deadline::in(kEndTime); !end && !until.expired();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    end = watch_.end_of(rank);
  }
  return end;
}

void Peers::lost(int rank, const Step* step) {
  // A member hears of others' ends from the root, which may have said so before it ended itself.
  while (const auto frame = to(rank).take()) {
    if (frame->kind == FrameKind::kVerdict) hear_verdict(frame->payload, nullptr);
  }
  if (watch_.check) watch_.check();
  const std::string unknown =
      cat("rank ", rank, " is gone: its process ended or closed its connection",
          step == nullptr ? "" : cat(" in stage ", step->stage));
  fail(Error(ErrorCode::kPeerFailed, await_end(rank).value_or(unknown)), rank);
}

void Peers::hear_verdict(const std::string& payload, const Step* step) {
  const auto verdict = from_bytes<Verdict>(payload);
  ensure(verdict.has_value(), "a verdict of ", payload.size(), " bytes");
  const std::string sentence = payload.substr(sizeof(Verdict));
  const auto code = static_cast<ErrorCode>(verdict->code);
  const bool timeout = code == ErrorCode::kTimeout;
  if (timeout && step != nullptr && verdict->missing_rank != rank_) {
    const Error error = missing_error(*step, verdict->missing_rank, verdict->present);
    failure_.raise(rank_, error.what());
    throw error;
  }
  // If it is a timeout, others have given up on a rank that comes late: this one, or the root.
  const Error error = timeout ? Error(ErrorCode::kPeerFailed, "the group is unusable: " + sentence)
                              : Error(code, sentence);
  if (rank_ == 0) fail(error, verdict->failed_rank);  // tells all others
  failure_.raise(verdict->failed_rank, sentence);
  throw error;
}

}  // namespace uniep::tcp
