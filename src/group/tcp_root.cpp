#include "group/tcp_root.h"

#include <memory>
#include <utility>

namespace uniep::tcp {
namespace {

RollCall complete_parts(const Gathered& parts) {
  RollCall roll;
  for (const auto& part : parts) roll.here.push_back(part.has_value());
  return roll;
}

/// A part that is under way has come, as far as the time limit is concerned.
RollCall coming_parts(Peers& peers, const Gathered& parts) {
  RollCall roll = complete_parts(parts);
  for (int r = 1; r < peers.size(); ++r) {
    if (peers.to(r).receiving()) roll.here[static_cast<std::size_t>(r)] = true;
  }
  return roll;
}

void require_nobody_lost(Peers& peers, const RollCall& complete, const Step& step) {
  for (int r = 1; r < peers.size(); ++r) {
    const bool missing = !complete.here[static_cast<std::size_t>(r)];
    if (peers.to(r).ended() || (missing && peers.is_gone(r))) peers.lost(r, &step);
  }
}

Parts collect(Peers& peers, const std::string& bytes, const Step& step) {
  Gathered parts(static_cast<std::size_t>(peers.size()));
  parts[0] = bytes;
  Deadline standstill = step.deadline;  // unless bytes move before
  for (;;) {
    const std::vector<Connection*> asking = read_members(peers, step, &parts);
    const RollCall complete = complete_parts(parts);
    const RollCall coming = coming_parts(peers, parts);
    answer(peers, asking, step, coming);
    require_nobody_lost(peers, complete, step);
    if (complete.complete()) break;

    const bool all_coming = coming.complete();
    const Deadline until = all_coming ? standstill : step.deadline;
    if (peers.pump(peers.connections(), until)) {
      standstill = step.renewed();
    } else if (until.expired()) {
      peers.give_up_on_missing(step, all_coming ? complete : coming);
    }
  }
  Parts all;
  for (auto& part : parts) all.push_back(std::move(*part));
  return all;
}

/// The first rank that has not got all yet; nothing where all have.
std::optional<int> first_receiver(Peers& peers, const Step& step) {
  std::optional<int> first;
  for (int r = 1; r < peers.size(); ++r) {
    const Connection& c = peers.to(r);
    if (c.undeliverable()) peers.lost(r, &step);
    if (c.sending() && !first) first = r;
  }
  return first;
}

void deliver(Peers& peers, const Parts& parts, const Step& step) {
  const auto result = std::make_shared<const std::string>(pack(parts));
  for (Connection* c : peers.connections()) {
    c->send(FrameKind::kResult, result);
    c->write_some();
  }
  Deadline standstill = step.renewed();
  while (const auto receiver = first_receiver(peers, step)) {
    if (peers.pump(peers.connections(), standstill)) {
      standstill = step.renewed();
    } else if (standstill.expired()) {
      peers.give_up_on(*receiver, step, peers.size());
    }
  }
}

}  // namespace

Parts gather_as_root(Peers& peers, const std::string& bytes, const Step& step) {
  Parts parts = collect(peers, bytes, step);
  deliver(peers, parts, step);
  return parts;
}

std::vector<Connection*> read_members(Peers& peers, const Step& step, Gathered* parts) {
  std::vector<Connection*> asking;
  for (int r = 1; r < peers.size(); ++r) {
    while (auto frame = peers.to(r).take()) {
      if (frame->kind == FrameKind::kVerdict) peers.hear_verdict(frame->payload, nullptr);
      if (frame->kind == FrameKind::kPart && parts != nullptr) {
        (*parts)[static_cast<std::size_t>(r)] = std::move(frame->payload);
      }
      // A question of an earlier round has crossed that round's result.
      if (frame->kind == FrameKind::kExpired &&
          from_bytes<std::uint64_t>(frame->payload) == step.round) {
        asking.push_back(&peers.to(r));
      }
    }
  }
  return asking;
}

void answer(Peers& peers, const std::vector<Connection*>& asking, const Step& step,
            const RollCall& roll) {
  if (!asking.empty() && !roll.complete()) peers.give_up_on_missing(step, roll);
  for (Connection* member : asking) member->send(FrameKind::kWorking);
}

}  // namespace uniep::tcp
