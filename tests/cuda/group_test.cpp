// A layer in several processes, when something goes wrong in one of them.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "base/cuda/device_scope.h"
#include "cuda/cuda_schedules.h"
#include "cuda/gpu_group.h"
#include "cuda/gpu_rank.h"

namespace uniep::testing {
namespace {

using std::chrono::milliseconds;

/// Of every wait. Making a layer has to be done within it too.
constexpr int kLimitMs = 8000;
constexpr milliseconds kSlack{2500};
constexpr int kCulprit = 1;

class CudaGroup : public OnGpus {
 protected:
  const LayerData data_ = small_layer(ranks());
};
class CudaGroupOfAnySize : public CudaGroup {};
INSTANTIATE_TEST_SUITE_P(Gpus, CudaGroup, ::testing::Values(2, 4), ranks_name);
INSTANTIATE_TEST_SUITE_P(Gpus, CudaGroupOfAnySize, ::testing::Values(2, 4, 8), ranks_name);

// ---- What must not show

/// Nor does what forward keeps. Some of the layers have shared experts.
TEST_P(CudaGroupOfAnySize, DelaysAndWrappingCountersChangeNoBit) {
  const auto said = on_gpus(ranks(), [&](const Communicator& c) -> std::string {
    for (unsigned seed = 1; seed <= 5; ++seed) {
      const LayerData data = small_layer(ranks(), seed, seed % 2 == 0 ? 2 : 0);
      const LayerResult want = GpuRank(data, c).step(cuda_schedules()[0]);
      const FaultInjection faults{.max_delay_us = 100, .seed = seed, .first_count = 0u - 5 * seed};
      const GpuRankOptions kept{.save = kSaves[seed % std::size(kSaves)],
                                .recompute_h = seed % 5 >= 3};
      GpuRank rank(data, c, {.fault_injection = faults}, kept);
      for (const Schedule& schedule : cuda_schedules()) {
        for (int step = 0; step < 4; ++step) {
          const std::string tensor = difference(rank.step(schedule), want);
          if (!tensor.empty()) {
            return cat(tensor, " differs: seed ", seed, ", step ", step, ", ", to_string(schedule));
          }
        }
      }
    }
    return "same";
  });
  expect_same(said);
}

// ---- A rank that is missing

/// What every rank but kCulprit says when that one leaves after a step and a plan.
std::vector<std::string> without_culprit(const LayerData& data, int ranks, const Schedule& schedule,
                                         const std::function<void()>& leave) {
  return on_gpus(ranks, [&](const Communicator& c) -> std::string {
    GpuRank rank(data, c, {.timeout_ms = kLimitMs});
    rank.step(schedule);  // kernels are loaded, memory is taken
    rank.plan();
    rank.layer().synchronize();
    if (c.rank() == kCulprit) {
      leave();
      return "left";
    }
    return failure_of(
        [&] {
          rank.forward(schedule);
          rank.layer().synchronize();
        },
        milliseconds(kLimitMs) + kSlack);
  });
}

void expect_culprit_named(const std::vector<std::string>& said) {
  for (std::size_t r = 0; r < said.size(); ++r) {
    if (static_cast<int>(r) == kCulprit) continue;
    EXPECT_EQ(said[r].rfind(cat("rank ", r, ": wait expired after ", kLimitMs,
                                " ms (timeout_ms or UNIEP_TIMEOUT_MS) in stage dispatch, tile "),
                            0),
              0u)
        << said[r];
    EXPECT_NE(said[r].find(", peer 1: expected 1 published, seen 0"), std::string::npos) << said[r];
  }
}

TEST_P(CudaGroup, ARankThatNeverLaunchesIsNamedByAllOthers) {
  for (const Schedule& schedule : cuda_schedules()) {
    SCOPED_TRACE(to_string(schedule));
    const auto said = without_culprit(data_, ranks(), schedule, [] {
      std::this_thread::sleep_for(milliseconds(kLimitMs) + kSlack);
    });
    EXPECT_EQ(said[kCulprit], "left");
    expect_culprit_named(said);
  }
}

TEST_P(CudaGroup, ARankThatDiesIsNamedByAllOthers) {
  const auto said =
      without_culprit(data_, ranks(), cuda_schedules().back(), [] { raise(SIGKILL); });
  EXPECT_EQ(said[kCulprit], "signal 9");
  expect_culprit_named(said);
}

/// What a rank says that steps until a step fails; "late" where that takes longer than any wait
/// may. The last kind of counter is waited for by five sixteenths longer than the first.
std::string steps_until_failure(GpuRank& rank, const Schedule& schedule) {
  constexpr milliseconds kMost = milliseconds(kLimitMs + kLimitMs * 5 / 16) + kSlack;
  for (int i = 0; i < 100'000; ++i) {
    const std::string said = failure_of([&] { rank.step(schedule); }, kMost);
    if (said != "no error") return said;
  }
  return "no error";
}

/// At any moment of a step. Who waits for a rank that waits for the lost one may name that instead.
TEST_P(CudaGroupOfAnySize, ARankThatIsLostInTheMiddleOfStepsEndsThoseOfAllOthers) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    SCOPED_TRACE(signal);
    const auto said = on_gpus(ranks(), [&](const Communicator& c) -> std::string {
      GpuRank rank(data_, c, {.timeout_ms = kLimitMs});
      const Schedule schedule = cuda_schedules().back();
      rank.step(schedule);  // kernels are loaded, memory is taken
      const auto processes =
          c.impl()->bootstrap().all_gather(cat(getpid()), "processes", kConnectLimitMs);
      std::thread end;
      if (c.rank() == kCulprit) {
        end = std::thread([signal] {
          std::this_thread::sleep_for(milliseconds(200));
          kill(getpid(), signal);
        });
      }
      const std::string failure = steps_until_failure(rank, schedule);
      if (end.joinable()) end.join();
      if (c.rank() == 0) kill(std::stoi(processes[kCulprit]), SIGKILL);  // a stopped one, too
      return failure;
    });
    EXPECT_EQ(said[kCulprit], "signal 9");
    int named = 0;
    for (std::size_t r = 0; r < said.size(); ++r) {
      if (static_cast<int>(r) == kCulprit) continue;
      EXPECT_EQ(said[r].rfind(cat("rank ", r, ": wait expired after ", kLimitMs, " ms"), 0), 0u)
          << said[r];
      if (said[r].find(cat("peer ", kCulprit)) != std::string::npos) ++named;
    }
    EXPECT_GT(named, 0) << said[0];
  }
}

// ---- A rank that is wrong

TEST_P(CudaGroup, AnotherShapeIsRefusedByAllRanks) {
  const auto said = on_gpus(ranks(), [&](const Communicator& c) {
    Problem problem = workload::Split(data_, c.size()).problem();
    if (c.rank() == kCulprit) problem.hidden += 8;
    return failure_of([&] { const Layer layer(problem, c); }, milliseconds(kLimitMs));
  });
  EXPECT_EQ(said[0].rfind("ranks disagree: rank 0 calls layer hidden=264,", 0), 0u) << said[0];
  EXPECT_EQ(said, std::vector<std::string>(said.size(), said[0]));
}

/// Rank kCulprit makes a wrong call, the others a right one: all say the same, long before the
/// limit, and go on saying it.
void expect_refused(int ranks, const LayerData& data, const std::string& sentence,
                    const std::function<void(GpuRank&, bool wrong)>& call) {
  const auto said = on_gpus(ranks, [&](const Communicator& c) -> std::string {
    GpuRank rank(data, c, {.timeout_ms = kConnectLimitMs});
    rank.step(cuda_schedules()[0]);
    rank.plan();
    const std::string first = failure_of(
        [&] {
          call(rank, c.rank() == kCulprit);
          rank.layer().synchronize();
        },
        milliseconds(kLimitMs));
    const std::string again = failure_of([&] { rank.plan(); }, milliseconds(kLimitMs));
    return first == again ? first : cat(first, "; then: ", again);
  });
  EXPECT_EQ(said, std::vector<std::string>(said.size(), sentence));
}

TEST_P(CudaGroup, ARefusalInForwardIsHeardByAllRanks) {
  const std::size_t x = 300 * 264;
  expect_refused(ranks(), data_, cat("rank 1: x has ", x - 1, " elements; [T, H] needs ", x),
                 [](GpuRank& rank, bool wrong) {
                   ForwardArgs args = rank.forward_args();
                   if (wrong) args.x = args.x.first(args.x.size() - 1);
                   rank.layer().forward(rank.last_plan(), args, cuda_schedules().back());
                 });
}

TEST_P(CudaGroup, ARefusalInPlanIsHeardByAllRanks) {
  expect_refused(ranks(), data_,
                 "rank 1: topk_ids has 1199 elements; a multiple of topk=4 is accepted",
                 [](GpuRank& rank, bool wrong) {
                   const auto ids = rank.topk_ids();
                   rank.layer().plan(wrong ? ids.first(ids.size() - 1) : ids);
                 });
}

TEST_P(CudaGroup, ATensorThatStartsBetweenItsElementsIsRefusedByAllRanks) {
  const auto said = on_gpus(ranks(), [&](const Communicator& c) -> std::string {
    GpuRank rank(data_, c, {.timeout_ms = kConnectLimitMs});
    rank.plan();
    return failure_of(
        [&] {
          ForwardArgs args = rank.forward_args();
          if (c.rank() == kCulprit) args.out = {args.out.data() + 4, args.out.size()};
          rank.layer().forward(rank.last_plan(), args, cuda_schedules().back());
          rank.layer().synchronize();
        },
        milliseconds(kLimitMs));
  });
  EXPECT_EQ(said[0].rfind("rank 1: out starts at address ", 0), 0u) << said[0];
  EXPECT_EQ(said, std::vector<std::string>(said.size(), said[0]));
}

// ---- A rank whose calls come from elsewhere

/// A thread begins with device 0 as its current one, and has it again behind the calls where this
/// process uses that; else it keeps the layer's. The layer is made there, too.
TEST_P(CudaGroup, CallsMayComeFromAnyThread) {
  expect_same(on_gpus(ranks(), [&](const Communicator& c) -> std::string {
    GpuRank rank(data_, c);
    const LayerResult want = rank.step(cuda_schedules().back());
    rank.load(data_);
    std::exception_ptr error;
    int device = -1;
    std::thread([&] {
      try {
        Layer layer(rank.layer().problem(), c);
        const RoutingPlan plan = layer.plan(rank.topk_ids());
        const Schedule schedule = cuda_schedules().back();
        const Saved saved = layer.forward(plan, rank.forward_args(), schedule);
        layer.backward(saved, rank.backward_args(), schedule);
        layer.synchronize();
        device = cuda::current_device();
      } catch (...) {
        error = std::current_exception();
      }
    }).join();
    if (error) std::rethrow_exception(error);
    const int expected = cuda::has_context(0) ? 0 : cuda::current_device();
    if (device != expected) return cat("the thread's device is now ", device);
    const std::string tensor = difference(rank.result(), want);
    return tensor.empty() ? "same" : cat(tensor, " differs");
  }));
}

}  // namespace
}  // namespace uniep::testing
