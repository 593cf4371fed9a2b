#include "group/process_group.h"

#include <exception>
#include <new>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/env.h"
#include "base/error_of.h"
#include "base/random_number.h"
#include "group/agreement.h"
#include "group/own_address.h"

namespace uniep {
namespace {

/// The place where a rank's segment is to be found.
struct SegmentPlace {
  std::int64_t descriptor;
  std::uint64_t number;
  std::uint64_t group;
};

/// What all ranks sent.
std::vector<SegmentPlace> places_of(const std::vector<std::string>& parts) {
  std::vector<SegmentPlace> places;
  for (const std::string& part : parts) {
    const auto place = from_bytes<SegmentPlace>(part);
    ensure(place.has_value(), "a place of ", part.size(), " bytes");
    places.push_back(*place);
  }
  return places;
}

/// Added to the limit of waiting for all to have connected, so that who misses one says so first.
constexpr int kTellingMs = 1000;

/// What must be the same on all ranks for times to be the same.
std::string group_text() {
  return cat("CPU group with UNIEP_CPU_LINK_GBPS=", env_link_gbps().value_or(0),
             ", UNIEP_CPU_LINK_LATENCY_US=", env_link_latency_us(),
             ", UNIEP_CPU_NETWORK_GBPS=", env_network_gbps());
}

/// The first rank of the member's host.
int first_here(const GroupMember& member) {
  return member.layout.rank_at(member.layout.host_of(member.rank), 0);
}

SegmentIdentity board_identity(const GroupMember& member, std::uint64_t group) {
  return {.group = group,
          .rank = first_here(member),
          .size = member.size,
          .number = 0,
          .bytes = static_cast<std::int64_t>(sizeof(GroupBoard))};
}

/// The board in a segment that this rank has made or mapped.
std::shared_ptr<GroupBoard> board_in(std::shared_ptr<SharedSegment> segment, bool made) {
  std::byte* memory = segment->content();
  auto* board = made ? new (memory) GroupBoard : reinterpret_cast<GroupBoard*>(memory);
  return {std::move(segment), board};
}

/// Collective: the first rank of each host makes its board, and all say where they are.
std::vector<SegmentPlace> tell_places(GroupMember& member, std::shared_ptr<SharedSegment>& board) {
  SegmentPlace own{.descriptor = -1, .number = 0, .group = 0};
  std::string call, payload;
  const auto make_board = [&] {
    call = group_text();  // whose variables may be out of their range
    if (member.rank == first_here(member)) {
      own.group = random_number();
      board = std::make_shared<SharedSegment>(board_identity(member, own.group));
      own.descriptor = board->descriptor();
    }
    payload = to_bytes(own);
  };
  return places_of(
      agree(*member.bootstrap, member.limit_ms, Stage::kPlan, call, make_board, payload));
}

/// The processes are watched already: where the memory is right, so are they.
ProcessGroup::Peers meet(GroupMember& member) {
  std::shared_ptr<SharedSegment> made;
  const std::vector<SegmentPlace> places = tell_places(member, made);
  ProcessGroup::Peers peers;
  peers.group = places[0].group;
  const SegmentPlace& at = places[static_cast<std::size_t>(first_here(member))];
  if (made) peers.board = board_in(made, true);
  agree(*member.bootstrap, member.limit_ms, Stage::kPlan, "meeting of CPU ranks", [&] {
    require(member.processes != nullptr, ErrorCode::kUnsupported,
            "the ranks' processes cannot see each other; those of one PID namespace, on Linux 5.3 "
            "or newer, are accepted, and others of one host with a UNIEP_HOST_ID of their own");
    member.processes->require_complete();
    if (!made) {
      peers.board = board_in(std::make_shared<SharedSegment>(
                                 member.processes->pid(first_here(member)),
                                 static_cast<int>(at.descriptor), board_identity(member, at.group)),
                             false);
    }
  });
  if (made) made->close();
  return peers;
}

}  // namespace

std::shared_ptr<ProcessGroup> ProcessGroup::make(GroupMember member) {
  Peers peers = meet(member);
  return std::make_shared<ProcessGroup>(std::move(member), std::move(peers));
}

ProcessGroup::ProcessGroup(GroupMember member, Peers peers)
    : CpuGroup(member.layout, member.ranks_of_machine, peers.board),
      member_(std::move(member)),
      peers_(std::move(peers)) {
  member_.bootstrap->watch({.check = [this] { failure().check(); },
                            .end_of = [this](int rank) { return end_of(rank); }});
  if (layout().hosts > 1) connect_rail();
}

/// Collective. Where a rank has no transport, or is refused by others, throws the same on all
/// ranks.
void ProcessGroup::connect_rail() {
  const std::vector<std::string> addresses = open_rail();
  if (member_.before_rails) member_.before_rails();
  std::optional<Error> refused;
  try {
    rail_->connect(addresses, rail_watch(), member_.limit_ms);
  } catch (const Error& e) {
    if (e.code() == ErrorCode::kTimeout || e.code() == ErrorCode::kPeerFailed) {
      // There is nobody to agree with about it: the others hear of it as they wait.
      failure().raise(member_.rank, e.what());
      throw;
    }
    refused = e;
  }
  agree(*this, member_.limit_ms + kTellingMs, Stage::kPlan, "connected rails", [&] {
    if (refused) throw Error(*refused);
  });
}

/// Collective: makes this rank's, and tells where all are.
std::vector<std::string> ProcessGroup::open_rail() {
  std::string address;
  const auto open = [&] {
    rail_ = make_rail(
        {.rank = member_.rank,
         .layout = layout(),
         .address = member_.root_address.empty() ? "127.0.0.1" : own_address(member_.root_address),
         .group = peers_.group,
         .gigabytes_per_second = env_network_gbps()});
    address = rail_->address();
  };
  return agree(*this, member_.limit_ms, Stage::kPlan, "rails between hosts", open, address);
}

RailWatch ProcessGroup::rail_watch() {
  return {
      .failure = [this]() -> std::optional<RailFailure> {
        const auto found = failure().failure();
        if (!found) return std::nullopt;
        return RailFailure{found->rank, found->sentence};
      },
      .failed = [this](const RailFailure& f) { failure().raise(member_.rank, f.rank, f.sentence); },
      .ended =
          [this](int rank, bool lost) {
            board().ended[rank].store(lost ? RankEnd::kLost : RankEnd::kLeft,
                                      std::memory_order_release);
          },
      .check = [this] { check_connecting(); }};
}

/// Throws where a rank that this one's rail waits for has come to an end: its own host's ranks and
/// rank 0 see that, and tell.
void ProcessGroup::check_connecting() {
  for (int host = 0; host < layout().hosts; ++host) {
    const int peer = layout().rank_at(host, layout().local_of(member_.rank));
    if (const auto end = end_of(peer)) {
      throw Error(ErrorCode::kPeerFailed, cat("rank ", member_.rank, " in stage connect: ", *end));
    }
  }
  try {
    member_.bootstrap->check();
  } catch (const Error& e) {
    throw Error(e.code(), cat("rank ", member_.rank, " in stage connect: ", e.what()));
  }
}

ProcessGroup::~ProcessGroup() {
  if (std::uncaught_exceptions() > 0) {
    failure().raise(member_.rank, "it left with an exception on its way");
  }
  if (courier_) courier_->finish([this] { return failure().raised(); });
  courier_.reset();
  rail_.reset();
  board().ended[member_.rank].store(RankEnd::kLeft, std::memory_order_release);
}

std::vector<std::string> ProcessGroup::all_gather(int, const std::string& bytes, const char* stage,
                                                  int limit_ms) {
  failure().check();
  try {
    return member_.bootstrap->all_gather(bytes, stage, limit_ms);
  } catch (const std::exception& e) {
    // Peers may be in a pass, and wait for this rank there.
    failure().raise(member_.rank, error_of(e).what());
    throw;
  }
}

std::shared_ptr<Heap> ProcessGroup::allocate(int rank, std::int64_t bytes) {
  const auto segment = std::make_shared<SharedSegment>(SegmentIdentity{
      .group = peers_.group, .rank = rank, .size = size(), .number = ++segments_, .bytes = bytes});
  std::erase_if(allocated_, [](const auto& earlier) { return earlier.expired(); });
  allocated_.push_back(segment);
  return std::make_shared<Heap>(segment->content(), bytes, segment);
}

std::shared_ptr<SharedSegment> ProcessGroup::segment_of(const Heap& heap) const {
  for (const auto& segment : allocated_) {
    const auto held = segment.lock();
    if (held && held->content() == heap.data()) return held;
  }
  throw Error(ErrorCode::kUnsupported,
              "memory that this process has of its own cannot be shared with other processes; what "
              "uniep allocates is accepted");
}

std::vector<std::shared_ptr<Heap>> ProcessGroup::share(int rank, const std::shared_ptr<Heap>& own,
                                                       int limit_ms) {
  std::shared_ptr<SharedSegment> segment;
  std::string payload;
  const auto find_own = [&] {
    segment = segment_of(*own);
    payload = to_bytes(SegmentPlace{.descriptor = segment->descriptor(),
                                    .number = segment->identity().number,
                                    .group = peers_.group});
  };
  const auto places = places_of(
      agree(*this, limit_ms, Stage::kPlan, "shared memory of CPU ranks", find_own, payload));
  std::vector<std::shared_ptr<Heap>> all;
  const auto open_all = [&] {
    for (int r = 0; r < size(); ++r) {
      if (!layout().same_host(rank, r)) {
        all.push_back(nullptr);
        continue;
      }
      const SegmentPlace& at = places[static_cast<std::size_t>(r)];
      SegmentIdentity expected = segment->identity();
      expected.rank = r;
      expected.number = at.number;
      const auto mapped =
          r == rank ? segment
                    : std::make_shared<SharedSegment>(member_.processes->pid(r),
                                                      static_cast<int>(at.descriptor), expected);
      all.push_back(std::make_shared<Heap>(mapped->content(), expected.bytes, mapped));
    }
  };
  // Nobody closes its memory before all have opened it.
  agree(*this, limit_ms, Stage::kPlan, "opening memory of CPU ranks", open_all);
  segment->close();
  return all;
}

std::optional<std::string> ProcessGroup::end_of(int rank) {
  if (rank < 0 || rank == member_.rank) return std::nullopt;
  const auto heard = [&]() -> std::optional<std::string> {
    switch (board().ended[rank].load(std::memory_order_acquire)) {
      case RankEnd::kLeft:
        return cat("rank ", rank, " has left the group, and its work is needed");
      case RankEnd::kLost:
        return cat("rank ", rank, " was lost: its connection to host ",
                   layout().host_of(member_.rank), " ended");
      case RankEnd::kNone:
        break;
    }
    return std::nullopt;
  };
  if (const auto end = heard()) return end;
  const auto end = member_.processes->end_of(rank);
  // It may have left between the two looks.
  const auto later = end ? heard() : std::nullopt;
  return later ? later : end;
}

}  // namespace uniep
