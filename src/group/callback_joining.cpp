#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/env.h"
#include "base/random_number.h"
#include "group/communicator_impl.h"
#include "group/host_layout.h"
#include "group/joining.h"
#include "group/own_address.h"
#include "group/tcp_socket.h"
#include "uniep/version.h"

// Joining by the caller's all_gather, to which all ranks bring plain bytes, the same number: their
// cards. Where these show several hosts, they gather once more where rank 0 is to be found.

namespace uniep {
namespace {

constexpr char kLoopback[] = "127.0.0.1";

template <std::size_t N>
void put(char (&field)[N], const std::string& text) {
  std::memcpy(field, text.data(), std::min(text.size(), N - 1));
}

/// A field that others filled: nothing says that it ends.
template <std::size_t N>
std::string get(const char (&field)[N]) {
  return {field, std::find(field, field + N, '\0')};
}

/// What a rank refuses travels to the others, so that all throw alike.
struct Refusal {
  std::int32_t code;  // 1 + ErrorCode, or 0
  char sentence[500];

  /// Runs `step`, and keeps what it refuses.
  template <class Step>
  void keep(const Step& step) {
    try {
      step();
    } catch (const Error& e) {
      code = 1 + static_cast<int>(e.code());
      put(sentence, e.what());
    }
  }
  void raise(std::size_t rank) const {
    require(code == 0, static_cast<ErrorCode>(code - 1), "rank ", rank, ": ", get(sentence));
  }
};

/// What every process tells the others.
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
  std::int32_t hosts;  // UNIEP_HOSTS, or 0
  Refusal refusal;
};

constexpr char kMagic[] = "uniepG2";

/// The place where rank 0 listens for ranks of other hosts; others tell nothing.
struct Door {
  char address[64];
  std::int32_t port;
  Refusal refusal;
};

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
    card.refusal.raise(r);
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

Card plain_card(const GroupOptions& options) {
  Card card{};
  put(card.magic, kMagic);
  put(card.version, UNIEP_VERSION_STRING);
  card.process = this_process();
  card.rank = options.rank;
  card.size = options.size;
  card.backend = static_cast<int>(options.backend);
  return card;
}

Card own_card(const GroupOptions& options, Descriptor& listener) {
  Card card = plain_card(options);
  card.refusal.keep([&] {
    validate(options);
    put(card.host, host_id());
    card.hosts = env_hosts();
    (void)env_timeout_ms();  // which may be out of its range
    if (options.rank != 0) return;
    card.group = random_number();
    listener = tcp::listen_at_any_port(kLoopback);
    card.port = tcp::port_of(listener);
  });
  return card;
}

template <class T>
std::vector<T> gather(const GroupOptions& options, const T& own) {
  std::vector<T> all(static_cast<std::size_t>(options.size));
  options.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

bool can_gather(const GroupOptions& o) {
  return o.size > 1 && o.size <= kMaxGroupRanks && o.all_gather != nullptr;
}

/// Collective: rank 0 listens on the network between the hosts instead of its own alone.
void meet_on_network(const GroupOptions& options, TcpMeeting& meeting) {
  Door own{};
  if (options.rank == 0) {
    own.refusal.keep([&] {
      const std::string address = own_address(env_master_addr().value_or(""));
      meeting.listener = tcp::listen_at_any_port(address);
      put(own.address, address);
      own.port = tcp::port_of(meeting.listener);
    });
  }
  const Door door = gather(options, own)[0];
  door.refusal.raise(0);
  meeting.address = get(door.address);
  meeting.port = door.port;
}

/// What the cards of all ranks say together.
struct Meeting {
  RankLayout layout{};
  int ranks_of_machine = 1;
  bool on_network = false;  ///< whether hosts are really several
  std::vector<ProcessId> processes{};
};

/// Collective.
Meeting meet(const GroupOptions& options, TcpMeeting& place) {
  require(options.all_gather != nullptr, ErrorCode::kInvalidArgument, "all_gather of a group of ",
          options.size, " is empty; a function that gathers bytes of all ranks is accepted");
  const std::vector<Card> cards = gather(options, own_card(options, place.listener));
  require_fit(cards);
  place.port = cards[0].port;
  place.group = cards[0].group;
  Meeting meeting;
  std::vector<std::string> ids;
  std::vector<std::int32_t> hosts;
  for (const Card& card : cards) {
    meeting.processes.push_back(card.process);
    ids.push_back(get(card.host));
    hosts.push_back(card.hosts);
  }
  meeting.layout = layout_of_group(ids, hosts);
  meeting.ranks_of_machine = ranks_beside(ids, options.rank);
  meeting.on_network = are_several(ids);
  return meeting;
}

}  // namespace

RankLayout find_hosts(const GroupOptions& options) {
  require_group_size(options.size);
  if (options.size == 1) {
    validate(options);
    return {};
  }
  TcpMeeting place{.address = kLoopback};
  return meet(options, place).layout;
}

void refuse_group(const GroupOptions& options, const Error& error) {
  if (can_gather(options)) {
    Card card = plain_card(options);
    card.refusal.keep([&] { throw error; });
    require_fit(gather(options, card));
  }
  throw error;  // of a group of one, or where the others cannot be told
}

GroupMember join_group(const GroupOptions& options) {
  require_group_size(options.size);
  if (options.size == 1) {
    validate(options);
    GroupMember member = alone(options.device);
    member.share_device = options.share_device;
    return member;
  }
  TcpMeeting place{.address = kLoopback};
  Meeting meeting = meet(options, place);
  GroupMember member{.rank = options.rank,
                     .size = options.size,
                     .device = options.device,
                     .share_device = options.share_device,
                     .limit_ms = options.timeout_ms > 0 ? options.timeout_ms : env_timeout_ms()};
  member.layout = meeting.layout;
  member.ranks_of_machine = meeting.ranks_of_machine;
  require_backend_of(member.layout, options.backend);
  if (meeting.on_network) {
    meet_on_network(options, place);
    member.root_address = place.address;
  }
  member.processes = ProcessWatch::of(member.rank, meeting.processes, member.layout);
  place.watch = member.watch();
  member.bootstrap =
      std::make_unique<TcpBootstrap>(member.rank, member.size, std::move(place), member.limit_ms);
  return member;
}

}  // namespace uniep
