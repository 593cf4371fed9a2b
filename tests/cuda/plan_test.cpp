// The plan kernel against RoutingPlan::build, array by array: the ranks of a group share one GPU.
#include <gtest/gtest.h>

#include <chrono>

#include "cuda/plan_ranks.h"
#include "plan/plan_data.h"
#include "support/cases.h"

namespace uniep::testing {
namespace {

using How = PlanGroup::Launch;

/// The index of the pull that fills each row; -1 in pad rows, where the device writes nothing.
std::vector<std::int32_t> pull_of_row(const PlanData& plan) {
  std::vector<std::int32_t> pulls(plan.row_origin.size(), -1);
  for (std::size_t i = 0; i < plan.pulls.size(); ++i) {
    for (int c = 0; c < plan.pulls[i].num_rows; ++c) {
      pulls[static_cast<std::size_t>(
          plan.pull_rows[static_cast<std::size_t>(plan.pulls[i].first_row + c)])] =
          static_cast<std::int32_t>(i);
    }
  }
  return pulls;
}

void expect_pull_of_row(const PlanData& want, const std::int32_t* device) {
  const std::vector<std::int32_t> pulls = pull_of_row(want);
  const auto got = download(device, static_cast<std::int64_t>(pulls.size()));
  for (std::size_t row = 0; row < pulls.size(); ++row) {
    if (pulls[row] < 0) continue;
    ASSERT_EQ(got[row], pulls[row]) << "pull_of_row[" << row << "]";
  }
}

void expect_plan(const PlanData& want, const cuda::DevicePlan& got) {
  ASSERT_TRUE(download(got.status, 1)[0].ok());
  ASSERT_EQ(download(got.num_pulls, 1)[0], static_cast<std::int64_t>(want.pulls.size()));
  expect_equal<std::int64_t>(want.tokens_per_rank, got.tokens_per_rank, "tokens_per_rank");
  expect_equal<std::int64_t>(want.tokens_per_expert, got.tokens_per_expert, "tokens_per_expert");
  expect_equal<std::int64_t>(want.segment_begin, got.segment_begin, "segment_begin");
  expect_equal<std::int32_t>(want.topk_ids, got.topk_ids, "topk_ids");
  expect_equal<RowOrigin>(want.row_origin, got.row_origin, "row_origin");
  expect_equal<Pull>(want.pulls, got.pulls, "pulls");
  expect_equal<std::int64_t>(want.pull_rows, got.pull_rows, "pull_rows");
  expect_pull_of_row(want, got.pull_of_row);
}

void expect_empty(const Problem& p, int num_ranks, const cuda::DevicePlan& got) {
  ASSERT_FALSE(download(got.status, 1)[0].ok());
  ASSERT_EQ(download(got.num_pulls, 1)[0], 0);
  const int experts = expert_numbers(p, num_ranks).of_rank();
  const std::vector<std::int64_t> zeros(static_cast<std::size_t>(experts + 1));
  expect_equal<std::int64_t>(std::span(zeros).first(zeros.size() - 1), got.tokens_per_expert,
                             "tokens_per_expert");
  expect_equal<std::int64_t>(zeros, got.segment_begin, "segment_begin");
}

/// The sentence of the error that `call` throws, or "".
template <class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

std::string reported(const PlanGroup& group, int rank, int limit_ms = kPlanLimitMs) {
  return error_of([&] {
    throw_if_any(*group.rank(rank).report.get(), group.problem(), rank, group.num_ranks(),
                 limit_ms);
  });
}

/// Runs the plan on every rank and compares all, errors included, with what the CPU says.
void expect_same_as_cpu(PlanGroup& group, const Routing& routing, How how, int ctas, int shift) {
  group.run(routing, how, ctas, shift);
  for (int r = 0; r < group.num_ranks(); ++r) {
    SCOPED_TRACE(cat("rank ", r));
    const std::string error = error_of([&] { routing.plan(r); });
    ASSERT_EQ(reported(group, r), error);
    if (error.empty()) {
      ASSERT_NO_FATAL_FAILURE(expect_plan(routing.plan(r).data(), group.plan(r)));
    } else {
      ASSERT_NO_FATAL_FAILURE(expect_empty(group.problem(), group.num_ranks(), group.plan(r)));
    }
    *group.rank(r).report.get() = {};
  }
}

/// Few CTAs where ranks run together, so that all are resident.
int random_ctas(Rng& rng, How how, int num_ranks) {
  if (how == How::kTogether) return static_cast<int>(pick(rng, 1, 64 / num_ranks));
  return static_cast<int>(chance(rng, 50) ? one_per_sm() : pick(rng, 1, 132));
}

/// Something that both sides must refuse, or nothing.
void spoil(Rng& rng, Routing& r) {
  const std::int64_t slots = static_cast<std::int64_t>(r.ids.size());
  const int bad_ids = chance(rng, 30) ? static_cast<int>(pick(rng, 1, 3)) : 0;
  for (int i = 0; i < bad_ids && slots > 0; ++i) {
    const bool low = chance(rng, 50);
    r.ids[static_cast<std::size_t>(pick(rng, 0, slots - 1))] = static_cast<std::int32_t>(
        low ? -1 - pick(rng, 1, 1000) : r.problem.num_experts + pick(rng, 0, 1000));
  }
}

using PlanKernel = CudaTest;

void compare_random_routings(How how, int count) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    Rng rng(seed);
    const int ranks = static_cast<int>(pick(rng, 1, 8));
    Problem problem = random_problem(rng, ranks, chance(rng, 20) ? 3000 : 120);
    if (chance(rng, 10)) problem.num_experts = ranks * static_cast<int>(pick(rng, 6, 200));
    draw_shared_experts(rng, problem);
    if (chance(rng, 20)) problem.capacity_rows = pick(rng, 1, 60 * problem.row_align);
    if (chance(rng, 20)) problem.backward_rows = pick(rng, 1, 20) * problem.row_align;
    PlanGroup group(problem, ranks);
    const int plans = chance(rng, 10) ? 20 : 3;
    for (int i = 0; i < plans; ++i) {
      Routing routing = random_routing(rng, problem, ranks);
      if (chance(rng, 20)) spoil(rng, routing);
      SCOPED_TRACE(cat("seed ", seed, ", plan ", i, ", ", describe(routing)));
      ASSERT_NO_FATAL_FAILURE(expect_same_as_cpu(group, routing, how, random_ctas(rng, how, ranks),
                                                 static_cast<int>(pick(rng, 0, 3))));
    }
  }
}

TEST_F(PlanKernel, EqualsTheCpuPlanOneByOne) { compare_random_routings(How::kOneByOne, cases(60)); }

TEST_F(PlanKernel, EqualsTheCpuPlanWithRanksThatWaitForOneAnother) {
  compare_random_routings(How::kTogether, cases(60));
}

TEST_F(PlanKernel, ALargeRoutingOfOneRank) {
  Rng rng(7);
  for (const int experts : {8, 256, 2048}) {
    const Problem p{
        .hidden = 8, .intermediate = 8, .num_experts = experts, .topk = 8, .max_tokens = 20'000};
    PlanGroup group(p, 1);
    for (int i = 0; i < 2; ++i) {
      const Routing routing = random_routing(rng, p, 1);
      SCOPED_TRACE(describe(routing));
      ASSERT_NO_FATAL_FAILURE(expect_same_as_cpu(group, routing, How::kTogether, one_per_sm(), 0));
    }
  }
}

TEST_F(PlanKernel, AnImpossibleNumberOfTokensIsRefusedByEveryRank) {
  const Problem p{.hidden = 8, .intermediate = 8, .num_experts = 6, .topk = 2, .max_tokens = 10};
  PlanGroup group(p, 3);
  for (const std::int64_t tokens : {std::int64_t{11}, std::int64_t{-1}, std::int64_t{1} << 40}) {
    Routing routing{p, {4, tokens, 11}, std::vector<std::int32_t>(8, 1)};
    ASSERT_NO_FATAL_FAILURE(expect_same_as_cpu(group, routing, How::kTogether, 2, 0));
    routing.tokens = {4, 0, 0};
    ASSERT_NO_FATAL_FAILURE(expect_same_as_cpu(group, routing, How::kTogether, 2, 0));
  }
}

TEST_F(PlanKernel, TheFirstErrorIsKeptUntilTheHostClearsIt) {
  const Problem p{.hidden = 8, .intermediate = 8, .num_experts = 2, .topk = 1, .max_tokens = 4};
  PlanGroup group(p, 1);
  group.run({p, {2}, {0, 7}}, How::kTogether, one_per_sm());
  const std::string first = reported(group, 0);
  EXPECT_EQ(first, "topk_ids of rank 0, token 1, slot 0 is 7; -1 (dropped) to 1 is accepted");
  group.run({p, {2}, {-9, 0}}, How::kTogether, one_per_sm());
  EXPECT_EQ(reported(group, 0), first);
  group.run({p, {2}, {1, 0}}, How::kTogether, one_per_sm());
  EXPECT_EQ(reported(group, 0), first);
  EXPECT_TRUE(download(group.plan(0).status, 1)[0].ok());
}

TEST_F(PlanKernel, APeerThatDoesNotComeIsNamed) {
  const Problem p{.hidden = 8, .intermediate = 8, .num_experts = 4, .topk = 2, .max_tokens = 4};
  PlanGroup group(p, 2);
  const Routing routing{p, {2, 0}, {0, 1, 2, 3}};
  ASSERT_NO_FATAL_FAILURE(expect_same_as_cpu(group, routing, How::kTogether, 8, 0));
  for (int plan = 0; plan < 2; ++plan) {  // the second finds the group unusable
    const auto start = std::chrono::steady_clock::now();
    group.launch(routing, 0, 8, 0, short_limit_ms());
    wait_for_all_devices();
    const auto took = std::chrono::steady_clock::now() - start;
    EXPECT_LT(took, std::chrono::milliseconds(kPlanLimitMs)) << "the limit is " << short_limit_ms();
    ASSERT_NO_FATAL_FAILURE(expect_empty(p, 2, group.plan(0)));
    EXPECT_EQ(
        reported(group, 0, short_limit_ms()),
        cat("rank 0: wait expired after ", short_limit_ms(),
            " ms (timeout_ms or UNIEP_TIMEOUT_MS) in stage plan, peer 1: expected 64 parts of its "
            "topk_ids, seen 0; collectives of NCCL that run beside passes need UNIEP_SPARE_SMS"));
  }
}

TEST_F(PlanKernel, AGraphReplaysWithOtherIds) {
  Rng rng(3);
  const Problem p{.hidden = 8, .intermediate = 8, .num_experts = 8, .topk = 4, .max_tokens = 100};
  PlanGroup group(p, 1);
  const cudaStream_t stream = group.rank(0).stream;
  Routing routing{p, {100}, std::vector<std::int32_t>(400)};
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cuda::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  group.launch(routing, 0, one_per_sm());
  cuda::check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
  cuda::check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  for (int i = 0; i < 5; ++i) {
    for (auto& id : routing.ids) id = static_cast<std::int32_t>(pick(rng, -1, 7));
    group.rank(0).plan_memory.fill(DeviceMemory::kPoison);
    upload(routing.ids, group.ids(0));
    wait_for_all_devices();
    cuda::check_cuda(cudaGraphLaunch(exec, stream), "replay");
    wait_for_all_devices();
    ASSERT_NO_FATAL_FAILURE(expect_plan(routing.plan(0).data(), group.plan(0)));
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

TEST(PlanKernelLimits, WhatIsUnsupportedIsSaid) {
  const Problem p{.hidden = 8, .intermediate = 8, .num_experts = 8, .topk = 4, .max_tokens = 100};
  EXPECT_FALSE(cuda::unsupported_reason(p, 8));
  EXPECT_EQ(cuda::unsupported_reason(p, 9),
            "the number of ranks is 9; the cuda backend accepts 1 to 8");
  Problem many = p;
  many.num_experts = 4096;
  EXPECT_EQ(cuda::unsupported_reason(many, 1),
            "problem.num_experts is 4096; the cuda backend accepts 1 to 2048");
  many.num_experts = 2040;
  EXPECT_FALSE(cuda::unsupported_reason(many, 8));
  many.shared_experts = 1;
  EXPECT_FALSE(cuda::unsupported_reason(many, 8));
  many.shared_experts = 2;
  EXPECT_EQ(cuda::unsupported_reason(many, 8),
            "problem.num_experts is 2040 and problem.shared_experts is 2 on each of 8 ranks, "
            "together 2056; the cuda backend accepts at most 2048");
  for (const int align : {16, 32, 64, 128, 256}) {
    Problem aligned = p;
    aligned.row_align = align;
    const auto reason = cuda::unsupported_reason(aligned, 1);
    EXPECT_EQ(reason.has_value(), align < 128);
    if (!reason) continue;
    EXPECT_EQ(*reason, cat("problem.row_align is ", align,
                           "; the cuda backend, whose tiles have 128 rows, accepts 128 and 256"));
  }
  many = p;
  many.max_tokens = 1 << 26;
  EXPECT_EQ(
      cuda::unsupported_reason(many, 8),
      "ranks * problem.max_tokens * (problem.topk) is 2147483648; the cuda backend accepts at "
      "most 2147483647");
}

}  // namespace
}  // namespace uniep::testing
