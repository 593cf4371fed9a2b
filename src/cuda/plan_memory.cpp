#include "cuda/plan_memory.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "cuda/device/sm90/tile_shape.h"
#include "cuda/wait_failure.h"
#include "schedule/open_sizes.h"
#include "schedule/pass_stages.h"
#include "schedule/received_tokens.h"
#include "schedule/token_waves.h"

namespace uniep::cuda {
namespace {

template <class T>
T* at(std::byte* base, std::int64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

}  // namespace

std::optional<std::string> unsupported_reason(const Problem& p, int num_ranks) {
  if (num_ranks > kMaxCudaRanks) {
    return cat("the number of ranks is ", num_ranks, "; the cuda backend accepts 1 to ",
               kMaxCudaRanks);
  }
  if (p.num_experts > kMaxExperts) {
    return cat("problem.num_experts is ", p.num_experts, "; the cuda backend accepts 1 to ",
               kMaxExperts);
  }
  if (const int experts = num_ranks * expert_numbers(p, num_ranks).of_rank();
      experts > kMaxExperts) {
    return cat("problem.num_experts is ", p.num_experts, " and problem.shared_experts is ",
               p.shared_experts, " on each of ", num_ranks, " ranks, together ", experts,
               "; the cuda backend accepts at most ", kMaxExperts);
  }
  if (p.row_align % kTileM != 0) {
    return cat("problem.row_align is ", p.row_align, "; the cuda backend, whose tiles have ",
               kTileM, " rows, accepts 128 and 256");
  }
  constexpr std::int64_t kMaxSlots = std::numeric_limits<std::int32_t>::max();
  const std::int64_t all_slots = num_ranks * p.max_tokens * slots(p);
  if (all_slots > kMaxSlots) {
    const char* more = p.shared_experts > 0 ? " + problem.shared_experts" : "";
    return cat("ranks * problem.max_tokens * (problem.topk", more, ") is ", all_slots,
               "; the cuda backend accepts at most ", kMaxSlots);
  }
  const std::int64_t received = most_received(p, num_ranks, capacity_rows(p, num_ranks));
  if (p.save == Save::kTokens && received * p.hidden / kPlaceElements > 2 * kMaxSlots) {
    return cat("problem.save is tokens, of which ", received,
               " may come with problem.hidden=", p.hidden,
               "; the cuda backend accepts at most 64 GiB of them in a forward pass");
  }
  return std::nullopt;
}

void throw_if_any(const PlanReport& report, const Problem& problem, int rank, int num_ranks,
                  std::int64_t limit_ms) {
  const WaitFailure& w = report.wait;
  if (w.raised != 0) {
    throw kernel_wait_error(w, rank, limit_ms, w.peer < 0 ? "CTAs" : "parts of its topk_ids");
  }
  throw_if_any(report.fault, problem, num_ranks);
}

DevicePlan device_plan(std::byte* base, const DevicePlanLayout& l) {
  return {.status = at<PlanStatus>(base, l.status),
          .num_pulls = at<std::int64_t>(base, l.num_pulls),
          .tokens_per_rank = at<std::int64_t>(base, l.tokens_per_rank),
          .tokens_per_expert = at<std::int64_t>(base, l.tokens_per_expert),
          .segment_begin = at<std::int64_t>(base, l.segment_begin),
          .topk_ids = at<std::int32_t>(base, l.topk_ids),
          .row_origin = at<RowOrigin>(base, l.row_origin),
          .pulls = at<Pull>(base, l.pulls),
          .pull_rows = at<std::int64_t>(base, l.pull_rows),
          .pull_of_row = at<std::int32_t>(base, l.pull_of_row),
          .num_pages = at<std::int32_t>(base, l.num_pages),
          .pages = at<std::int32_t>(base, l.pages)};
}

DeviceOrderLayout::DeviceOrderLayout(const Problem& p, int num_ranks, Pass pass,
                                     const Schedule& schedule, PassPart part) {
  const Schedule s = schedule_of_pass(schedule, p, pass);
  // Which blocks the queues hold depends on these alone.
  PassView sizes;
  sizes.pass = pass;
  sizes.part = part;
  sizes.schedule = s;
  sizes.choice = choice_of(p);
  sizes.gathered_hosts = p.gathered_hosts;
  sizes.first_host = p.first_host;
  sizes.num_local_experts = expert_numbers(p, num_ranks).of_rank();
  set_stages(sizes);
  num_queues = 2 * num_launches(sizes);
  for (int i = 0; i < num_queues; ++i) {
    const Launch launch = launch_contents(sizes, i / 2);
    queue_first[i + 1] = queue_first[i] + num_blocks(i % 2 == 0 ? launch.comm : launch.main);
  }

  const std::int64_t capacity = capacity_rows(p, num_ranks);
  const std::int64_t most_tiles = capacity / s.tile_m;  // segments are whole tiles long
  const std::int64_t blocks = sizes.num_blocks();
  const std::int64_t queue_blocks_total = queue_first[num_queues];
  detail::Ranges r;
  expert_order = r.take<std::int32_t>(sizes.num_local_experts);
  dispatched_per_expert = r.take<std::int64_t>(sizes.num_local_experts);
  tiles = r.take<Tile>(most_tiles);
  tile_begin = r.take<std::int64_t>(blocks + 1);
  pulls = r.take<Pull>(capacity);
  pull_begin = r.take<std::int64_t>(blocks + 1);
  slots_to_peer =
      r.take<std::int64_t>(ceil_div<std::int64_t>(p.max_tokens, s.token_block) * num_ranks);
  queue_blocks = r.take<QueueBlock>(queue_blocks_total);
  queue_begin = r.take<std::int64_t>(queue_blocks_total + num_queues);
  tile_position = r.take<std::int32_t>(most_tiles);
  first_rows = r.take<std::uint32_t>(most_tiles * chunks_a_tile(s));
  pulls_before = r.take<std::int32_t>(most_tiles * chunks_a_tile(s));
  cta_pulls = r.take<std::int32_t>(kMaxPlanCtas);
  bytes = r.bytes();
}

std::int64_t most_order_bytes(const Problem& p, int num_ranks) {
  // The most blocks, queues and token blocks; tiles have one size only.
  const Schedule most{.launch = LaunchGrouping::kPipelined,
                      .waves = kMostWaves,
                      .tile_m = kTileM,
                      .token_block = 1,
                      .wgrad = WgradPlacement::kSeparate};
  // A backward pass takes most without a ring of rows: with one its schedules have less.
  Problem all_rows = p;
  all_rows.backward_rows = 0;
  const auto bytes = [&](Pass pass) {
    return DeviceOrderLayout(all_rows, num_ranks, pass, most).bytes;
  };
  // If tokens come in waves, forward takes more.
  return std::max(bytes(Pass::kForward), bytes(Pass::kBackward));
}

DeviceOrder device_order(std::byte* base, const DeviceOrderLayout& l) {
  DeviceOrder o{.expert_order = at<std::int32_t>(base, l.expert_order),
                .dispatched_per_expert = at<std::int64_t>(base, l.dispatched_per_expert),
                .tiles = at<Tile>(base, l.tiles),
                .tile_begin = at<std::int64_t>(base, l.tile_begin),
                .pulls = at<Pull>(base, l.pulls),
                .pull_begin = at<std::int64_t>(base, l.pull_begin),
                .slots_to_peer = at<std::int64_t>(base, l.slots_to_peer),
                .queue_blocks = at<QueueBlock>(base, l.queue_blocks),
                .queue_begin = at<std::int64_t>(base, l.queue_begin),
                .tile_position = at<std::int32_t>(base, l.tile_position),
                .first_rows = at<std::uint32_t>(base, l.first_rows),
                .pulls_before = at<std::int32_t>(base, l.pulls_before),
                .cta_pulls = at<std::int32_t>(base, l.cta_pulls),
                .num_queues = l.num_queues};
  for (int i = 0; i <= l.num_queues; ++i) o.queue_first[i] = l.queue_first[i];
  return o;
}

PassView make_pass_view(const Problem& problem, int rank, int num_ranks, std::int64_t own_tokens,
                        const DevicePlan& plan, const DeviceOrder& order, Pass pass,
                        const Schedule& schedule, PassPart part) {
  PassView v;
  v.pass = pass;
  v.part = part;
  v.schedule = schedule_of_pass(schedule, problem, pass);
  set_problem(v, problem);
  v.rank = rank;
  v.num_ranks = num_ranks;
  v.num_local_experts = expert_numbers(problem, num_ranks).of_rank();
  v.tokens = own_tokens;
  set_stages(v);
  set_token_waves(v);
  v.segment_begin = plan.segment_begin;
  v.tokens_per_expert = plan.tokens_per_expert;
  v.topk_ids = plan.topk_ids;
  v.row_origin = plan.row_origin;
  v.pull_rows = plan.pull_rows;
  v.pull_of_row = plan.pull_of_row;
  v.expert_order = order.expert_order;
  v.dispatched_per_expert = order.dispatched_per_expert;
  v.tiles = order.tiles;
  v.tile_begin = order.tile_begin;
  v.pulls = order.pulls;
  v.pull_begin = order.pull_begin;
  v.slots_to_peer = order.slots_to_peer;
  return v;
}

PlanScratch plan_scratch(std::byte* base, const PlanScratchLayout& l) {
  return {.epoch = at<std::uint32_t>(base, l.epoch),
          .failed = at<std::uint32_t>(base, l.failed),
          .plan_arrivals = at<std::uint32_t>(base, l.plan_arrivals),
          .order_arrivals = at<std::uint32_t>(base, l.order_arrivals),
          .first_bad = at<unsigned long long>(base, l.first_bad),
          .totals = at<std::uint32_t>(base, l.totals),
          .cta_counts = at<std::uint32_t>(base, l.cta_counts)};
}

}  // namespace uniep::cuda
