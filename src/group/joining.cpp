#include "group/joining.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/env.h"
#include "base/random_number.h"
#include "group/communicator_impl.h"
#include "group/host_layout.h"
#include "group/tcp_socket.h"
#include "uniep/version.h"

namespace uniep {
namespace {

/// What a process of the environment's group tells the others, ahead of its host's id.
struct EnvironmentCard {
  ProcessId process{};
  std::int32_t hosts = 0;  // UNIEP_HOSTS, or 0
};

/// What every process tells the others through the callback; plain bytes, the same number from all.
struct Card {
  char magic[8];
  char version[24];
  char host[64];
  ProcessId process;
  std::uint64_t group;  // rank 0's
  std::int32_t port;    // rank 0's
  std::int32_t rank;
  std::int32_t size;
  std::int32_t backend;
  std::int32_t hosts;    // UNIEP_HOSTS, or 0
  std::int32_t refusal;  // 1 + ErrorCode, or 0
  char sentence[500];
};

constexpr char kMagic[] = "uniepG1";

template <std::size_t N>
void put(char (&field)[N], const std::string& text) {
  std::memcpy(field, text.data(), std::min(text.size(), N - 1));
}

/// A field that others filled: nothing says that it ends.
template <std::size_t N>
std::string get(const char (&field)[N]) {
  return {field, std::find(field, field + N, '\0')};
}

/// The same in all containers of a host, and different on any two hosts.
std::string host_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

void validate(const GroupOptions& o) {
  require(o.rank >= 0 && o.rank < o.size, ErrorCode::kInvalidArgument, "group rank is ", o.rank,
          "; 0 to ", o.size - 1, " is accepted in a group of ", o.size);
  require(o.timeout_ms >= 0 && o.timeout_ms <= kLongestWaitMs, ErrorCode::kInvalidArgument,
          "timeout_ms of the group is ", o.timeout_ms, "; 1 to ", kLongestWaitMs,
          " is accepted, and 0 for UNIEP_TIMEOUT_MS");
}

/// What the cards of all ranks must agree on; all ranks have the same cards.
void require_fit(const std::vector<Card>& cards) {
  for (std::size_t r = 0; r < cards.size(); ++r) {
    const Card& card = cards[r];
    require(get(card.magic) == kMagic, ErrorCode::kInvalidArgument, "all_gather of the group put ",
            "bytes in place ", r,
            " that no rank passed; those of every rank, rank after rank, are ", "accepted");
    require(card.refusal == 0, static_cast<ErrorCode>(card.refusal - 1), "rank ", r, ": ",
            get(card.sentence));
    require(card.rank == static_cast<int>(r), ErrorCode::kInvalidArgument,
            "all_gather of the group put the bytes of rank ", card.rank, " in place ", r,
            "; rank after rank is accepted");
    const Card& first = cards[0];
    const auto require_same = [&](bool same, const char* what) {
      require(same, ErrorCode::kInvalidArgument, "ranks 0 and ", r, " differ in ", what,
              "; the same on all ranks of a group is accepted");
    };
    require_same(card.size == first.size, "the size of their group");
    require_same(card.backend == first.backend, "the backend of their group");
    require_same(get(card.version) == get(first.version), "the version of uniep");
  }
}

Card own_card(const GroupOptions& options, Descriptor& listener) {
  Card card{};
  put(card.magic, kMagic);
  put(card.version, UNIEP_VERSION_STRING);
  put(card.host, host_id());
  card.process = this_process();
  card.rank = options.rank;
  card.size = options.size;
  card.backend = static_cast<int>(options.backend);
  try {
    validate(options);
    card.hosts = env_hosts();
    if (options.rank == 0) {
      card.group = random_number();
      listener = tcp::listen_at_loopback();
      card.port = tcp::port_of(listener);
    }
  } catch (const Error& e) {
    card.refusal = 1 + static_cast<int>(e.code());
    put(card.sentence, e.what());
  }
  return card;
}

TcpWatch watch_of(const std::shared_ptr<const ProcessWatch>& processes) {
  if (!processes) return {};
  return {.check = {}, .end_of = [processes](int rank) { return processes->end_of(rank); }};
}

std::vector<Card> exchange(const GroupOptions& options, const Card& own) {
  std::vector<Card> cards(static_cast<std::size_t>(options.size));
  options.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(cards)));
  return cards;
}

}  // namespace

GroupMember alone(int device) {
  GroupMember member{.device = device, .limit_ms = env_timeout_ms()};
  member.bootstrap = std::make_unique<TcpBootstrap>(0, 1, "", 0, member.limit_ms);
  return member;
}

GroupMember join_group(const GroupOptions& options) {
  require_group_size(options.size);
  if (options.size == 1) {
    validate(options);
    GroupMember member = alone(options.device);
    member.share_device = options.share_device;
    return member;
  }
  require(options.all_gather != nullptr, ErrorCode::kInvalidArgument, "all_gather of a group of ",
          options.size, " is empty; a function that gathers bytes of all ranks is accepted");

  Descriptor listener;
  const std::vector<Card> cards = exchange(options, own_card(options, listener));
  require_fit(cards);
  std::vector<std::string> ids;
  std::vector<std::int32_t> hosts;
  for (const Card& card : cards) {
    ids.push_back(get(card.host));
    hosts.push_back(card.hosts);
  }
  for (std::size_t r = 1; r < ids.size(); ++r) {
    require(ids[r] == ids[0], ErrorCode::kUnsupported, "ranks 0 and ", r,
            " run on different hosts; a group whose ranks are all on one host is accepted, and of "
            "CPU ranks that join by RANK and its companions in the environment one on several");
  }

  GroupMember member{.rank = options.rank,
                     .size = options.size,
                     .device = options.device,
                     .share_device = options.share_device,
                     .limit_ms = options.timeout_ms > 0 ? options.timeout_ms : env_timeout_ms()};
  member.layout = layout_of_group(ids, hosts);
  std::vector<ProcessId> processes;
  for (const Card& card : cards) processes.push_back(card.process);
  member.processes = ProcessWatch::of(member.rank, processes, member.layout);
  TcpMeeting meeting{.address = "127.0.0.1",
                     .port = cards[0].port,
                     .group = cards[0].group,
                     .listener = std::move(listener),
                     .watch = watch_of(member.processes)};
  member.bootstrap =
      std::make_unique<TcpBootstrap>(member.rank, member.size, std::move(meeting), member.limit_ms);
  return member;
}

GroupMember join_group(const ProcessEnvironment& environment, int limit_ms) {
  GroupMember member{.rank = environment.rank,
                     .size = environment.size,
                     .device = environment.local_rank,
                     .limit_ms = limit_ms};
  member.bootstrap = std::make_unique<TcpBootstrap>(
      member.rank, member.size, environment.master_address, environment.master_port, limit_ms);
  std::vector<ProcessId> processes;
  std::vector<std::string> ids;
  std::vector<std::int32_t> hosts;
  const EnvironmentCard own{.process = this_process(), .hosts = env_hosts()};
  const std::string own_bytes(reinterpret_cast<const char*>(&own), sizeof(own));
  for (const std::string& bytes :
       member.bootstrap->all_gather(own_bytes + host_id(), "connect", limit_ms)) {
    ensure(bytes.size() >= sizeof(EnvironmentCard), "a host of ", bytes.size(), " bytes");
    EnvironmentCard card;
    std::memcpy(&card, bytes.data(), sizeof(card));
    processes.push_back(card.process);
    hosts.push_back(card.hosts);
    ids.push_back(bytes.substr(sizeof(card)));
  }
  member.layout = layout_of_group(ids, hosts);
  if (member.layout.hosts > 1 && hosts[0] == 0) {
    member.address = tcp::own_address_towards(environment.master_address);
  }
  member.processes = ProcessWatch::of(member.rank, processes, member.layout);
  member.bootstrap->watch(watch_of(member.processes));
  return member;
}

GroupMember join_group_of_environment() {
  const auto environment = process_environment();
  return environment ? join_group(*environment, env_timeout_ms()) : alone();
}

}  // namespace uniep
