#include "group/joining.h"

#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "base/env.h"
#include "group/host_layout.h"

namespace uniep {
namespace {

/// What a process of the environment's group tells the others, ahead of its host's id.
struct EnvironmentCard {
  ProcessId process{};
  std::int32_t hosts = 0;  // UNIEP_HOSTS, or 0
};

/// Alone on a rank what is wrong with its environment would leave the others without a reason.
std::string environment_card(TcpBootstrap& bootstrap) {
  try {
    (void)env_timeout_ms();
    const EnvironmentCard own{.process = this_process(), .hosts = env_hosts()};
    return to_bytes(own) + host_id();
  } catch (const Error& e) {
    bootstrap.abandon(e.what());
    throw;
  }
}

/// The environment's limit. If that is wrong, the usual one until the others have been told.
int limit_of_joining() {
  try {
    return env_timeout_ms();
  } catch (const Error&) {
    return kUsualWaitMs;
  }
}

}  // namespace

TcpWatch GroupMember::watch() const {
  if (!processes) return {};
  return {.check = {}, .end_of = [seen = processes](int other) { return seen->end_of(other); }};
}

GroupMember alone(int device) {
  GroupMember member{.device = device, .limit_ms = env_timeout_ms()};
  member.bootstrap = std::make_unique<TcpBootstrap>(0, 1, "", 0, member.limit_ms);
  return member;
}

GroupMember join_group(const ProcessEnvironment& environment, int limit_ms) {
  GroupMember member{.rank = environment.rank,
                     .size = environment.size,
                     .device = environment.local_rank,
                     .limit_ms = limit_ms};
  auto bootstrap = std::make_unique<TcpBootstrap>(member.rank, member.size,
                                                  TcpMeeting{.address = environment.master_address,
                                                             .port = environment.master_port,
                                                             .group = environment.run},
                                                  limit_ms);
  std::vector<ProcessId> processes;
  std::vector<std::string> ids;
  std::vector<std::int32_t> hosts;
  const std::string own = environment_card(*bootstrap);
  for (const std::string& bytes : bootstrap->all_gather(own, "connect", limit_ms)) {
    const auto card = from_bytes<EnvironmentCard>(bytes);
    ensure(card.has_value(), "a host of ", bytes.size(), " bytes");
    processes.push_back(card->process);
    hosts.push_back(card->hosts);
    ids.push_back(bytes.substr(sizeof(*card)));
  }
  member.layout = layout_of_group(ids, hosts);
  member.ranks_of_machine = ranks_beside(ids, member.rank);
  if (are_several(ids)) member.root_address = environment.master_address;
  member.processes = ProcessWatch::of(member.rank, processes, member.layout);
  bootstrap->watch(member.watch());
  member.bootstrap = std::move(bootstrap);
  return member;
}

GroupMember join_group_of_environment() {
  const auto environment = process_environment();
  return environment ? join_group(*environment, limit_of_joining()) : alone();
}

}  // namespace uniep
