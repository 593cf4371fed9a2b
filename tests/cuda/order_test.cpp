// The order kernel against PassOrder and QueueTable, array by array.
#include <gtest/gtest.h>

#include "cuda/plan_ranks.h"
#include "schedule/pass_order.h"
#include "schedule/queue_table.h"
#include "support/cases.h"
#include "support/ring_rows.h"

namespace uniep::testing {
namespace {

void expect_queues(const PassView& want, const cuda::DeviceOrder& got) {
  ASSERT_EQ(got.num_queues, 2 * num_launches(want));
  for (int q = 0; q < got.num_queues; ++q) {
    SCOPED_TRACE(cat("queue ", q));
    const Launch launch = launch_at(want, q / 2);
    const QueueTable queue(want, q % 2 == 0 ? launch.comm : launch.main);
    const QueueView view = queue.view();
    ASSERT_EQ(got.queue_size(q), view.count);
    expect_equal(view.blocks, got.blocks_of(q), view.count, "queue_blocks");
    expect_equal(view.begin, got.begin_of(q), view.count + 1, "queue_begin");
  }
}

void expect_order(const PassView& want, const cuda::DeviceOrder& got) {
  const int blocks = want.num_blocks();
  expect_equal(want.expert_order, got.expert_order, want.num_local_experts, "expert_order");
  expect_equal(want.dispatched_per_expert, got.dispatched_per_expert, want.num_local_experts,
               "dispatched_per_expert");
  expect_equal(want.tile_begin, got.tile_begin, blocks + 1, "tile_begin");
  expect_equal(want.tiles, got.tiles, want.tile_begin[blocks], "tiles");
  expect_equal(want.pull_begin, got.pull_begin, blocks + 1, "pull_begin");
  expect_equal(want.pulls, got.pulls, want.pull_begin[blocks], "pulls");
  expect_equal(want.slots_to_peer, got.slots_to_peer, want.num_token_blocks() * want.num_ranks,
               "slots_to_peer");
  expect_queues(want, got);
}

/// Everything that the host need not know about the routing.
struct OrderRun {
  OrderRun(const PlanGroup& group, int rank, std::int64_t tokens, Pass pass,
           const Schedule& schedule)
      : device(PlanRank::use(group.rank(rank).device)),
        layout(group.problem(), group.num_ranks(), pass, schedule),
        memory(layout.bytes),
        order(cuda::device_order(memory.data(), layout)),
        args{cuda::make_pass_view(group.problem(), rank, group.num_ranks(), tokens,
                                  group.plan(rank), order, pass, schedule),
             group.plan(rank), order, group.scratch(rank)} {}

  void run(int ctas, cudaStream_t stream) const {
    wait_for_all_devices();
    PlanRank::use(device);
    cuda::check_cuda(cuda::launch_order(args, ctas, stream), "launch order");
    wait_for_all_devices();
  }

  int device;
  cuda::DeviceOrderLayout layout;
  DeviceMemory memory;
  cuda::DeviceOrder order;
  cuda::OrderArgs args;
};

void compare(Rng& rng, const PlanGroup& group, const Routing& routing, int rank) {
  const RoutingPlan plan = routing.plan(rank);
  for (int i = 0; i < 3; ++i) {
    const Schedule schedule =
        random_schedule(rng, group.problem(), 4, chance(rng, 50) ? Backend::kCuda : Backend::kCpu);
    const Pass pass = chance(rng, 60) ? Pass::kBackward : Pass::kForward;
    SCOPED_TRACE(cat("rank ", rank, ", ", name(pass), ", ", to_string(schedule)));
    const PassOrder want(plan.data(), pass, schedule);
    const OrderRun got(group, rank, plan.tokens(), pass, schedule);
    got.run(static_cast<int>(chance(rng, 50) ? one_per_sm() : pick(rng, 1, 132)),
            group.rank(rank).stream);
    ASSERT_NO_FATAL_FAILURE(expect_order(want.view(), got.order));
  }
}

using OrderKernel = CudaTest;

TEST_F(OrderKernel, EqualsTheCpuOrder) {
  const int count = cases(60);
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    Rng rng(seed);
    const int ranks = static_cast<int>(pick(rng, 1, 8));
    Problem problem = random_problem(rng, ranks, chance(rng, 20) ? 3000 : 120);
    if (chance(rng, 10)) problem.num_experts = ranks * static_cast<int>(pick(rng, 6, 200));
    draw_shared_experts(rng, problem);
    if (chance(rng, 30)) problem.probs = Probs::kAfter;
    if (chance(rng, 30)) draw_gathered_hosts(rng, problem);
    Routing routing = random_routing(rng, problem, ranks);
    if (chance(rng, 40)) {
      problem.backward_rows =
          ring_rows(routing.ids, problem.num_experts, problem.row_align, pick(rng, 0, 3),
                    problem.shared_experts > 0 ? std::ranges::max(routing.tokens) : 0);
      routing.problem = problem;
    }
    PlanGroup group(problem, ranks);
    SCOPED_TRACE(cat("seed ", seed, ", ", describe(routing)));
    group.run(routing, PlanGroup::Launch::kOneByOne, one_per_sm());
    for (int r = 0; r < ranks; ++r) ASSERT_NO_FATAL_FAILURE(compare(rng, group, routing, r));
  }
}

TEST_F(OrderKernel, AnUnusablePlanHasNoTasks) {
  const Problem p{.hidden = 8, .intermediate = 8, .num_experts = 2, .topk = 1, .max_tokens = 4};
  PlanGroup group(p, 1);
  group.run({p, {2}, {0, 7}}, PlanGroup::Launch::kTogether, one_per_sm());
  for (const char* text : {"sequential", "pipelined:2", "two-kernel", "single"}) {
    const OrderRun run(group, 0, 2, Pass::kBackward, parse_schedule(text));
    run.run(one_per_sm(), group.rank(0).stream);
    for (int q = 0; q < run.order.num_queues; ++q) {
      const std::vector<std::int64_t> zeros(static_cast<std::size_t>(run.order.queue_size(q) + 1));
      expect_equal(zeros.data(), run.order.begin_of(q), static_cast<std::int64_t>(zeros.size()),
                   "queue_begin");
    }
  }
}

}  // namespace
}  // namespace uniep::testing
