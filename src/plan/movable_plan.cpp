#include "plan/movable_plan.h"

#include <cstring>

#include "base/check.h"
#include "base/mixed_bits.h"
#include "layout/workspace.h"

namespace uniep {
namespace {

constexpr std::uint64_t kMagic = 0x6e616c7065696e75u;  // "unieplan"

/// A copy that may begin anywhere.
template <class T>
void put(std::span<std::byte> bytes, std::int64_t offset, std::span<const T> values) {
  if (!values.empty()) std::memcpy(bytes.data() + offset, values.data(), values.size_bytes());
}
template <class T>
std::vector<T> get(std::span<const std::byte> bytes, std::int64_t offset, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  if (count > 0) std::memcpy(values.data(), bytes.data() + offset, values.size() * sizeof(T));
  return values;
}

/// The checksum of a header, as it lies in memory: a damaged one has numbers that no type allows.
std::uint64_t checksum_of(std::span<const std::byte> bytes, std::int64_t header) {
  constexpr std::int64_t kFirst = offsetof(CpuPlanHeader, fingerprint);
  constexpr std::int64_t kSize = sizeof(CpuPlanHeader);
  static_assert(kFirst % sizeof(std::uint64_t) == 0 && kSize % sizeof(std::uint64_t) == 0);
  std::uint64_t sum = 0;
  for (const auto word :
       get<std::uint64_t>(bytes, header + kFirst, (kSize - kFirst) / sizeof(std::uint64_t))) {
    sum = hash_with(sum, word);
  }
  return sum;
}

}  // namespace

void write_plan(std::span<std::byte> bytes, const Problem& problem, int rank,
                const Routing& routing) {
  const CpuPlanLayout layout(problem, routing.num_ranks());
  const CpuPlanHeader header{.magic = kMagic,
                             .fingerprint = fingerprint(routing),
                             .problem = problem,
                             .rank = rank,
                             .num_ranks = routing.num_ranks()};
  put<CpuPlanHeader>(bytes, layout.header, {&header, 1});
  const std::uint64_t checksum = checksum_of(bytes, layout.header);
  put<std::uint64_t>(bytes, layout.header + offsetof(CpuPlanHeader, checksum), {&checksum, 1});
  put(bytes, layout.tokens_per_rank, routing.tokens_per_rank);
  put(bytes, layout.topk_ids, routing.topk_ids);
}

RoutingPlan read_plan(std::span<const std::byte> bytes, const Problem& problem, int rank,
                      int num_ranks, std::int64_t tokens, bool flagged, int hosts) {
  const CpuPlanLayout layout(problem, num_ranks);
  const auto require_plan = [](bool ok) {
    require(ok, ErrorCode::kInvalidArgument,
            "memory.plan does not hold a plan; what Layer::plan wrote, unchanged, is accepted");
  };
  const auto words = get<std::uint64_t>(bytes, layout.header, 2);
  require_plan(words[0] == kMagic && words[1] == checksum_of(bytes, layout.header));
  const CpuPlanHeader header = get<CpuPlanHeader>(bytes, layout.header, 1)[0];
  require(header.problem == problem && header.rank == rank && header.num_ranks == num_ranks,
          ErrorCode::kInvalidArgument, "memory.plan holds the plan of rank ", header.rank, " of ",
          header.num_ranks, " for ", to_string(header.problem), "; that of rank ", rank, " of ",
          num_ranks, " for ", to_string(problem), " is accepted");
  const auto tokens_per_rank = get<std::int64_t>(bytes, layout.tokens_per_rank, num_ranks);
  std::int64_t total = 0;
  for (const std::int64_t t : tokens_per_rank) {
    require_plan(t >= 0 && t <= problem.max_tokens);
    total += t;
  }
  require(tokens_per_rank[static_cast<std::size_t>(rank)] == tokens, ErrorCode::kInvalidArgument,
          "memory.plan holds a plan of ", tokens_per_rank[static_cast<std::size_t>(rank)],
          " tokens; one of ", tokens, " is accepted");
  const auto ids = get<std::int32_t>(bytes, layout.topk_ids, total * problem.topk);
  const Routing routing{tokens_per_rank, ids, hosts};
  require_plan(fingerprint(routing) == header.fingerprint);
  const RoutingCheck check = check_routing(problem, routing);
  if (!flagged) throw_if_any(check.fault, problem, num_ranks);
  return make_plan(problem, rank, routing, check, flagged);
}

}  // namespace uniep
