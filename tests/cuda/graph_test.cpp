// Steps captured in CUDA graphs: replayed with other routing and inputs they give the bytes of
// steps that were not, and what goes wrong in a replay is told as elsewhere. A process for each
// rank.
#include "cuda/graph.h"

#include <thread>

#include "base/math.h"
#include "cuda/cuda_schedules.h"
#include "cuda/gpu_group.h"
#include "cuda/gpu_rank.h"
#include "cuda/overflow_batches.h"

namespace uniep::testing {
namespace {

using std::chrono::milliseconds;

/// Enough for counters to wrap.
int replays(int ranks) { return sharing(ranks) ? 8 : 24; }
constexpr int kLimitMs = 8000;
constexpr int kCulprit = 1;

LayerOptions on(const Stream& stream, const FaultInjection& faults = {}) {
  return {.timeout_ms = kLimitMs, .cuda_stream = stream.get(), .fault_injection = faults};
}

/// To be captured: `rank` keeps plan and saved for the replays.
void step(GpuRank& rank, const Schedule& schedule) {
  rank.plan();
  rank.forward(schedule);
  rank.backward(schedule);
}

/// Beside a captured one.
void uncaptured_step(GpuRank& rank, const Schedule& schedule) {
  const RoutingPlan plan = rank.layer().plan(rank.topk_ids());
  const Saved saved = rank.layer().forward(plan, rank.forward_args(), schedule);
  rank.layer().backward(saved, rank.backward_args(), schedule);
}

class CudaGraph : public OnGpus {};
class CudaGraphOfGroups : public OnGpus {};
INSTANTIATE_TEST_SUITE_P(Gpus, CudaGraph, ::testing::Values(1, 2, 4), ranks_name);
INSTANTIATE_TEST_SUITE_P(Gpus, CudaGraphOfGroups, ::testing::Values(2, 4, 8), ranks_name);

// ---- What must not show

/// Replays `graphs`, which hold a step of `rank` together, for one batch after another; now and
/// then a step that is not captured, which counts in the same places, instead of them or between.
/// `shared`: experts of the layer.
std::string compare_replays(GpuRank& rank, GpuRank& uncaptured, int ranks, const Schedule& schedule,
                            std::span<const std::unique_ptr<Graph>> graphs, int shared = 0) {
  for (int i = 1; i <= replays(ranks); ++i) {
    const auto seed = static_cast<unsigned>(i);
    const LayerData batch = small_layer(ranks, seed, shared);
    uncaptured.load(batch);
    const LayerResult want = uncaptured.step(cuda_schedules()[0]);
    rank.load(batch);
    if (seed % 5 == 0) {
      uncaptured_step(rank, schedule);
    } else {
      for (const auto& graph : graphs) {
        if (graph != graphs.front() && seed % 3 == 0) uncaptured_step(rank, schedule);
        graph->replay();
      }
    }
    const std::string tensor = difference(rank.result(), want);
    if (!tensor.empty()) return cat(tensor, " differs in step ", seed, ", ", to_string(schedule));
  }
  return "same";
}

/// Captures nothing that was run before: first calls of a layer can be captured as well. The
/// counters wrap within the replays.
std::string captured_steps(const Communicator& c, const FaultInjection& faults, bool in_two,
                           const GpuRankOptions& extra = {}, int shared = 0) {
  const LayerData first = small_layer(c.size(), 1, shared);
  GpuRank uncaptured(first, c);
  for (const Schedule& schedule : cuda_schedules()) {
    const Stream stream;
    GpuRank rank(first, c, on(stream, faults), extra);
    std::vector<std::unique_ptr<Graph>> graphs;
    if (in_two) {
      graphs.push_back(std::make_unique<Graph>(stream, [&] {
        rank.plan();
        rank.forward(schedule);
      }));
      graphs.push_back(std::make_unique<Graph>(stream, [&] { rank.backward(schedule); }));
    } else {
      graphs.push_back(std::make_unique<Graph>(stream, [&] { step(rank, schedule); }));
    }
    const auto said = compare_replays(rank, uncaptured, c.size(), schedule, graphs, shared);
    if (said != "same") return said;
  }
  return "same";
}

TEST_P(CudaGraph, ReplaysHaveTheBytesOfUncapturedSteps) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) { return captured_steps(c, {}, false); }));
}

TEST_P(CudaGraph, ForwardAndBackwardMayBeGraphsOfTheirOwn) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) { return captured_steps(c, {}, true); }));
}

/// A graph brings the tensor maps of its weights, and of those of shared experts.
TEST_P(CudaGraph, WeightsMayBeATensorForEachExpert) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) {
    return captured_steps(c, {}, true, {.each = true}, c.size() == 2 ? 0 : 2);
  }));
}

TEST_P(CudaGraph, ReplaysUnderDelaysAndWrappingCountersHaveTheSameBytes) {
  const FaultInjection faults{.max_delay_us = 60, .seed = 3, .first_count = 0u - 9};
  expect_same(
      on_gpus(ranks(), [&](const Communicator& c) { return captured_steps(c, faults, false); }));
}

/// All that other ranks wait for in one graph, weight gradients in another, run later.
TEST_P(CudaGraph, DeferredWeightGradientsMayBeAGraphOfTheirOwn) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData first = small_layer(c.size());
    GpuRank uncaptured(first, c);
    for (const Schedule& schedule : cuda_schedules()) {
      const Stream stream;
      GpuRank rank(first, c, on(stream));
      std::vector<std::unique_ptr<Graph>> graphs;
      graphs.push_back(std::make_unique<Graph>(stream, [&] {
        rank.plan();
        rank.forward(schedule);
        rank.backward_data(schedule);
      }));
      graphs.push_back(
          std::make_unique<Graph>(stream, [&] { rank.backward_weights(cuda_schedules()[1]); }));
      const auto said = compare_replays(rank, uncaptured, c.size(), schedule, graphs);
      if (said != "same") return said;
    }
    return "same";
  }));
}

/// A layer picks its schedule in calls that are not captured as in those that are.
TEST_P(CudaGraph, StepsWithoutAScheduleCanBeCaptured) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData first = small_layer(c.size());
    const Stream stream;
    GpuRank uncaptured(first, c), rank(first, c, on(stream));
    Layer& layer = rank.layer();
    struct Held {
      std::optional<RoutingPlan> plan;
      Saved saved;
    };
    const auto step_of = [&](Held& held) {
      held.plan = layer.plan(rank.topk_ids());
      held.saved = layer.forward(*held.plan, rank.forward_args());
      layer.backward(held.saved, rank.backward_args());
    };
    const auto compare = [&](unsigned seed, const std::function<void()>& step) -> std::string {
      const LayerData batch = small_layer(c.size(), seed);
      uncaptured.load(batch);
      const LayerResult want = uncaptured.step(cuda_schedules()[0]);
      rank.load(batch);
      step();
      const std::string tensor = difference(rank.result(), want);
      return tensor.empty() ? "same" : cat(tensor, " differs in step ", seed);
    };
    std::string said = compare(1, [&] {
      Held held;
      step_of(held);
    });
    if (said != "same") return cat(said, ", not captured");
    Held held;
    const Graph graph(stream, [&] { step_of(held); });
    for (unsigned seed = 2; seed <= 6 && said == "same"; ++seed) {
      said = compare(seed, [&] { graph.replay(); });
    }
    return said;
  }));
}

// ---- A routing that has no plan

std::string overflow_text(int ranks) {
  const LayerData data = overflowing_batch(ranks);
  const std::int64_t experts = data.num_experts / ranks;
  const std::int64_t rows =
      experts * round_up<std::int64_t>(data.tokens * data.topk / experts, Problem{}.row_align);
  return cat("rank 0 would receive ", rows, " rows (padding included), but capacity_rows is ",
             kCapacity, "; capacity_rows=", rows, " would do for this routing");
}

/// `overflow(rank)` runs a step that has no plan. Before and after it, steps work; of itself,
/// nothing is left but the error.
std::string around_an_overflow(const Communicator& c, GpuRank& rank,
                               const std::function<void()>& step_of_rank,
                               const std::function<void()>& overflow) {
  GpuRank uncaptured(fitting_batch(c.size(), 1), c, {}, {.main_grad = true});
  for (unsigned seed = 1; seed <= 6; ++seed) {
    if (seed % 3 == 0) {
      rank.load(overflowing_batch(c.size()));
      const LayerResult before = rank.result();
      const auto said = failure_of(
          [&] {
            overflow();
            rank.layer().synchronize();
          },
          milliseconds(kLimitMs));
      if (said != overflow_text(c.size())) return said;
      const std::string written = difference(rank.result(), before);
      if (!written.empty()) return cat(written, " was written in spite of the overflow");
    }
    const LayerData batch = fitting_batch(c.size(), seed);
    uncaptured.load(batch);
    const LayerResult want = uncaptured.step(cuda_schedules()[0]);
    rank.load(batch);
    step_of_rank();
    const std::string tensor = difference(rank.result(), want);
    if (!tensor.empty()) return cat(tensor, " differs in step ", seed);
  }
  return "same";
}

TEST_P(CudaGraph, AnOverflowInAReplayIsToldByAllRanksAndWritesNothing) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    for (const Schedule& schedule : cuda_schedules()) {
      const Stream stream;
      GpuRank rank(fitting_batch(c.size(), 1), c, on(stream),
                   {.capacity_rows = kCapacity, .main_grad = true});
      const Graph graph(stream, [&] { step(rank, schedule); });
      const auto replay = [&] { graph.replay(); };
      const auto said = around_an_overflow(c, rank, replay, replay);
      if (said != "same") return cat(said, ", ", to_string(schedule));
    }
    return "same";
  }));
}

/// Some ranks' hosts find the overflow before they launch the passes of its plan, some after.
TEST_P(CudaGraph, AnOverflowIsToldByAllRanksAndWritesNothing) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    for (const Schedule& schedule : cuda_schedules()) {
      const Stream stream;
      GpuRank rank(fitting_batch(c.size(), 1), c, on(stream),
                   {.capacity_rows = kCapacity, .main_grad = true});
      const auto uncaptured = [&] { step(rank, schedule); };
      const auto overflow = [&] {
        rank.plan();
        if (c.rank() % 2 == 1) std::this_thread::sleep_for(milliseconds(100));
        rank.forward(schedule);
        if (c.rank() == 2) std::this_thread::sleep_for(milliseconds(100));
        rank.backward(schedule);
      };
      const auto said = around_an_overflow(c, rank, uncaptured, overflow);
      if (said != "same") return cat(said, ", ", to_string(schedule));
    }
    return "same";
  }));
}

/// Hosts hear of an overflow at different times, and none waits for the device before the next
/// batch: only calls of the plan that has no rows, and `synchronize`, may throw for it.
TEST_P(CudaGraph, AnOverflowDisturbsNoCallOfOtherPlans) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const Schedule schedule = cuda_schedules().back();
    const LayerData batch = fitting_batch(c.size(), 1);
    const LayerResult want = GpuRank(batch, c, {}, {.main_grad = true}).step(schedule);
    const Stream stream;
    GpuRank rank(batch, c, on(stream), {.capacity_rows = kCapacity, .main_grad = true});
    Layer& layer = rank.layer();
    const LayerData too_much = overflowing_batch(c.size());
    const workload::Split overflowing(too_much, c.size());
    const DeviceTensor<std::int32_t> ids(overflowing.topk_ids(c.rank()));
    cuda::check_cuda(cudaDeviceSynchronize(), "upload");
    for (int late = 0; late < 4; ++late) {  // who hears late, and at which call
      rank.load(batch);
      const auto pause = [&] {
        if ((c.rank() + late) % 2 == 1) std::this_thread::sleep_for(milliseconds(20));
      };
      const RoutingPlan bad = layer.plan(ids.span());
      if (late < 2) pause();
      rank.plan();
      if (late >= 2) pause();
      rank.forward(schedule);
      const auto said = failure_of(
          [&] {
            layer.forward(bad, rank.forward_args(), schedule);
            layer.synchronize();
          },
          milliseconds(kLimitMs));
      if (said != overflow_text(c.size())) return said;
      if (failure_of([&] { bad.padded_rows(); }, milliseconds(kLimitMs)) != said) {
        return "a plan without rows says how many it has";
      }
      rank.backward(schedule);
      const std::string tensor = difference(rank.result(), want);
      if (!tensor.empty()) return cat(tensor, " differs");
    }
    return "same";
  }));
}

// ---- Whose memory replays write

/// What a step leaves for later is not written by replays in between, whose calls had that memory
/// when they were captured.
TEST_P(CudaGraph, ReplaysLeaveWhatOthersHold) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    GpuRank uncaptured(small_layer(c.size()), c);
    for (const Schedule& schedule : cuda_schedules()) {
      const Stream stream;
      GpuRank rank(small_layer(c.size()), c, on(stream));
      Layer& layer = rank.layer();
      const Graph whole(stream, [&] { step(rank, schedule); });
      for (unsigned seed = 2; seed <= 4; ++seed) {
        const LayerData batch = small_layer(c.size(), seed);
        uncaptured.load(batch);
        const LayerResult want = uncaptured.step(schedule);
        rank.load(batch);
        const RoutingPlan plan = layer.plan(rank.topk_ids());
        Saved saved = layer.forward(plan, rank.forward_args(), schedule);
        layer.backward_data(saved, data_args(rank.backward_args()), schedule);
        const LayerResult first = rank.result();
        rank.load(small_layer(c.size(), seed + 10));
        whole.replay();
        rank.result();
        rank.load(batch);
        layer.backward_weights(saved, weights_args(rank.backward_args()), schedule);
        LayerResult got = rank.result();
        got.out = first.out;
        got.dx = first.dx;
        got.dprobs = first.dprobs;
        const std::string tensor = difference(got, want);
        if (!tensor.empty()) return cat(tensor, " differs, ", to_string(schedule));
      }
    }
    return "same";
  }));
}

// ---- Replays that fail

/// "same" where the sentence has all the parts.
std::string has_parts(const std::string& sentence, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (sentence.find(part) == std::string::npos) return cat("no '", part, "' in: ", sentence);
  }
  return "same";
}

TEST_P(CudaGraph, AWaitThatExpiresInAReplayIsTold) {
  if (ranks() > 1) GTEST_SKIP() << "one rank shows it";
  expect_same(on_gpus(1, [](const Communicator& c) -> std::string {
    for (const Schedule& schedule : cuda_schedules()) {
      const Stream stream;
      LayerOptions options = on(stream, {.withhold_rank = 0, .withhold_stage = Stage::kFc2});
      options.timeout_ms = 300;
      GpuRank rank(small_layer(1), c, options);
      const Graph graph(stream, [&] { step(rank, schedule); });
      graph.replay();
      const auto sync = [&] { rank.layer().synchronize(); };
      const std::string said = failure_of(sync, milliseconds(kLimitMs));
      const std::string verdict =
          has_parts(said, {"wait expired after 300 ms", "in stage reduce", "arrived"});
      if (verdict != "same") return verdict;
      graph.replay();
      const std::string again = failure_of(sync, milliseconds(kLimitMs));
      if (again != said) return cat("then: ", again);
    }
    return "same";
  }));
}

TEST_P(CudaGraphOfGroups, ARankThatDoesNotReplayIsNamedByAllOthers) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const Stream stream;
    GpuRank rank(small_layer(c.size()), c, on(stream));
    const Graph graph(stream, [&] { step(rank, cuda_schedules().back()); });
    for (int i = 0; i < 3; ++i) graph.replay();
    rank.layer().synchronize();
    if (c.rank() == kCulprit) {
      std::this_thread::sleep_for(milliseconds(kLimitMs + 2500));
      return "same";
    }
    graph.replay();
    return has_parts(
        failure_of([&] { rank.layer().synchronize(); }, milliseconds(kLimitMs + 2500)),
        {cat("rank ", c.rank(), ": wait expired"), "in stage plan", cat("peer ", kCulprit)});
  }));
}

/// Every rank makes `calls` with its ids, of which those of kCulprit lack the last: all say so,
/// long before their waits expire.
void expect_refusal_heard(
    int ranks,
    const std::function<void(GpuRank&, const Stream&, std::span<const std::int32_t>)>& calls) {
  expect_same(on_gpus(ranks, [&](const Communicator& c) -> std::string {
    const Stream stream;
    LayerOptions options = on(stream);
    options.timeout_ms = kConnectLimitMs;
    GpuRank rank(small_layer(c.size()), c, options);
    const auto ids = rank.topk_ids();
    const std::string said = failure_of(
        [&] { calls(rank, stream, c.rank() == kCulprit ? ids.first(ids.size() - 1) : ids); },
        milliseconds(kLimitMs));
    const std::string want = "rank 1: topk_ids has 1199 elements; a multiple of topk=4 is accepted";
    return said == want ? "same" : said;
  }));
}

/// A refusal has the number of the call that it is of. Replays count.
TEST_P(CudaGraphOfGroups, ARefusalEndsTheReplaysOfAllOthers) {
  expect_refusal_heard(ranks(), [](GpuRank& rank, const Stream& stream, auto ids) {
    const Graph graph(stream, [&] { step(rank, cuda_schedules().back()); });
    for (int i = 0; i < 3; ++i) graph.replay();
    rank.layer().synchronize();
    if (rank.rank() == kCulprit) rank.layer().plan(ids);
    graph.replay();
    rank.layer().synchronize();
  });
}

TEST_P(CudaGraphOfGroups, ARefusalIsToldToACallThatIsCaptured) {
  expect_refusal_heard(ranks(), [](GpuRank& rank, const Stream& stream, auto ids) {
    rank.layer().plan(ids);
    cuda::check_cuda(cudaStreamSynchronize(stream.get()), "wait for the refusal");
    const Graph graph(stream, [&] { step(rank, cuda_schedules().back()); });
  });
}

// ---- What a capture cannot do

TEST_P(CudaGraph, CallsThatWaitAreRefusedInACaptureAndDoNotSpoilIt) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const Stream stream;
    GpuRank rank(small_layer(c.size()), c, on(stream));
    GpuRank uncaptured(small_layer(c.size()), c);
    const RoutingPlan before = rank.layer().plan(rank.topk_ids());
    std::string complaint;
    std::vector<std::unique_ptr<Graph>> graphs;
    graphs.push_back(std::make_unique<Graph>(stream, [&] {
      step(rank, cuda_schedules().back());
      const std::function<void()> calls[] = {
          [&] { rank.layer().synchronize(); }, [&] { rank.layer().take_timeline(); },
          [&] { rank.layer().last_pass(); }, [&] { rank.last_plan().padded_rows(); },
          [&] { before.padded_rows(); }};
      for (const auto& call : calls) {
        const auto said = failure_of(call, milliseconds(kLimitMs));
        if (said.find("CUDA graph") == std::string::npos) complaint += said + "; ";
      }
    }));
    if (!complaint.empty()) return complaint;
    return compare_replays(rank, uncaptured, c.size(), cuda_schedules().back(), graphs);
  }));
}

TEST_P(CudaGraph, ACaptureThatNeedsMoreMemorySaysSoAndFindsItAfterAStep) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const Stream stream;
    const Schedule schedule = cuda_schedules().back();
    GpuRank rank(small_layer(c.size()), c, on(stream));
    Layer& layer = rank.layer();
    struct Held {
      std::vector<RoutingPlan> plans;
      std::vector<Saved> saved;
    };
    const auto two_at_a_time = [&](Held& held) {
      for (int i = 0; i < 2; ++i) held.plans.push_back(layer.plan(rank.topk_ids()));
      for (const RoutingPlan& plan : held.plans) {
        held.saved.push_back(layer.forward(plan, rank.forward_args(), schedule));
      }
      for (const Saved& s : held.saved) layer.backward(s, rank.backward_args(), schedule);
    };
    const std::string said = failure_of(
        [&] {
          Held held;
          const Graph graph(stream, [&] { two_at_a_time(held); });
        },
        milliseconds(kLimitMs));
    const std::string verdict = has_parts(said, {"this CUDA graph capture needs another buffer"});
    if (verdict != "same") return verdict;
    {
      Held held;
      two_at_a_time(held);
    }
    const LayerResult want = rank.result();
    rank.load(small_layer(c.size()));
    Held held;
    const Graph graph(stream, [&] { two_at_a_time(held); });
    graph.replay();
    const std::string tensor = difference(rank.result(), want);
    return tensor.empty() ? "same" : cat(tensor, " differs");
  }));
}

// ---- What can be seen of a replay

/// Tasks of backward passes; -1 where there are others.
std::int64_t backward_tasks(const std::vector<TimelineEvent>& events) {
  for (const TimelineEvent& event : events) {
    if (event.pass != Pass::kBackward) return -1;
  }
  return static_cast<std::int64_t>(events.size());
}

TEST_P(CudaGraph, TheTimelineHasTheLastPassOfTheLastReplay) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    for (const Schedule& schedule : cuda_schedules()) {
      const Stream stream;
      LayerOptions options = on(stream);
      options.record_timeline = true;
      GpuRank rank(small_layer(c.size()), c, options);
      const Graph graph(stream, [&] { step(rank, schedule); });
      uncaptured_step(rank, schedule);
      std::vector<TimelineEvent> events = rank.layer().take_timeline();
      std::erase_if(events, [](const TimelineEvent& e) { return e.pass == Pass::kForward; });
      const auto want = static_cast<std::int64_t>(events.size());
      for (int i = 0; i < 3; ++i) {
        graph.replay();
        graph.replay();
        const std::int64_t got = backward_tasks(rank.layer().take_timeline());
        if (got != want) return cat(got, " tasks of the backward pass, not ", want);
        const auto left = rank.layer().take_timeline().size();
        if (left != 0) return cat(left, " tasks were told twice");
      }
    }
    return "same";
  }));
}

}  // namespace
}  // namespace uniep::testing
