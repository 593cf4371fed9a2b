// Calls on several streams, and graphs: the bytes are those of steps on one stream. A process for
// each rank.
#include <chrono>
#include <thread>

#include "cuda/caller_memory.h"
#include "cuda/cuda_schedules.h"
#include "cuda/graph.h"

namespace uniep::testing {
namespace {

class CudaStreams : public OnGpus {};
INSTANTIATE_TEST_SUITE_P(Gpus, CudaStreams, ::testing::Values(1, 2, 4), ranks_name);

/// Each call is on another stream, and the host waits for nothing in between: rows of one step are
/// moved on the stream of the call before.
TEST_P(CudaStreams, CallsOnDifferentStreamsRunInTheirOrder) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData data = small_layer(c.size());
    const Problem problem = problem_of(data, c.size());
    const LayerBlocks blocks(needs_of(problem, c.size()));
    GpuRank own(data, c);
    const LayerResult want = own.step(cuda_schedules()[0]);
    const Stream streams[3];
    GpuRank callers(data, c, {.memory = blocks.memory()});
    GpuRank unieps(data, c);
    MovableStep kept(blocks.needs, problem);
    for (const Schedule& schedule : cuda_schedules()) {
      callers.forget_results();
      unieps.forget_results();
      int next = 0;
      const auto on_next = [&]() -> CallOptions {
        return {.schedule = schedule, .cuda_stream = streams[next++ % 3].get()};
      };
      const auto last_stream = [&] { return streams[(next + 2) % 3].get(); };
      for (int round = 0; round < rounds(c.size()); ++round) {
        CallOptions o = on_next();
        o.memory = kept.memory();
        const RoutingPlan plan = callers.layer().plan(callers.topk_ids(), o);
        o = on_next();
        o.memory = kept.memory();
        (void)callers.layer().forward(plan, callers.forward_args(), o);
        kept.move(last_stream());
        Saved saved = callers.layer().restore(kept.memory(false), callers.tokens());
        o = on_next();
        o.memory = kept.memory();
        callers.layer().backward_data(saved, data_args(callers.backward_args()), o);
        kept.move(last_stream());
        saved = callers.layer().restore(kept.memory(), callers.tokens());
        callers.layer().backward_weights(saved, weights_args(callers.backward_args()), on_next());
      }
      for (int round = 0; round < rounds(c.size()); ++round) {
        Layer& layer = unieps.layer();
        const RoutingPlan plan = layer.plan(unieps.topk_ids(), on_next());
        Saved saved = layer.forward(plan, unieps.forward_args(), on_next());
        layer.backward_data(saved, data_args(unieps.backward_args()), on_next());
        layer.backward_weights(saved, weights_args(unieps.backward_args()), on_next());
      }
      std::string tensor = difference(callers.result(), want);
      if (!tensor.empty()) return cat(tensor, " differs in the caller's memory");
      tensor = difference(unieps.result(), want);
      if (!tensor.empty()) return cat(tensor, " differs in uniep's memory");
    }
    return "same";
  }));
}

void sleep_on_host(void* ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(*static_cast<const int*>(ms)));
}

/// Of two layers, on two streams, of which one is held up on the first rank: there a call of the
/// other layer could begin ahead of the call before, whose kernels hold the SMs of the other ranks.
TEST_P(CudaStreams, CallsOfLayersRunInTheOrderInWhichTheyAreMade) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData data = small_layer(c.size());
    GpuRank own(data, c);
    const LayerResult want = own.step(cuda_schedules()[0]);
    GpuRank first(data, c, {.timeout_ms = 20000}), second(data, c, {.timeout_ms = 20000});
    const Stream streams[2];
    int ms = 150;
    for (const Schedule& schedule : cuda_schedules()) {
      first.forget_results();
      second.forget_results();
      const auto on = [&](int i) -> CallOptions {
        return {.schedule = schedule, .cuda_stream = streams[i].get()};
      };
      for (int round = 0; round < 3; ++round) {
        if (c.rank() == 0) {
          cuda::check_cuda(cudaLaunchHostFunc(streams[0].get(), sleep_on_host, &ms), "hold up");
        }
        const RoutingPlan plan = first.layer().plan(first.topk_ids(), on(0));
        const RoutingPlan other = second.layer().plan(second.topk_ids(), on(1));
        Saved saved = first.layer().forward(plan, first.forward_args(), on(0));
        Saved more = second.layer().forward(other, second.forward_args(), on(1));
        first.layer().backward(saved, first.backward_args(), on(0));
        second.layer().backward(more, second.backward_args(), on(1));
      }
      for (GpuRank* rank : {&first, &second}) {
        const std::string tensor = difference(rank->result(), want);
        if (!tensor.empty()) return tensor + " differs";
      }
    }
    return "same";
  }));
}

TEST_P(CudaStreams, AStreamThatEveryThreadHasItsOwnOfIsRefused) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    GpuRank rank(small_layer(c.size()), c, {.timeout_ms = 5000});
    try {
      (void)rank.layer().plan(rank.topk_ids(), {.cuda_stream = cudaStreamPerThread});
    } catch (const Error& error) {
      const std::string text = error.what();
      return text.find("cuda_stream is cudaStreamPerThread") != text.npos ? "same" : text;
    }
    return "it was accepted";
  }));
}

/// A step whose saved tensors are moved within the graph; it is replayed on another stream than the
/// one that captured it, in turns with steps that are not captured.
TEST_P(CudaStreams, GraphsInTheCallersMemoryAreReplayedOnAnyStream) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData first = small_layer(c.size());
    const Problem problem = problem_of(first, c.size());
    const LayerBlocks blocks(needs_of(problem, c.size()));
    GpuRank own(first, c);
    for (const Schedule& schedule : cuda_schedules()) {
      const Stream capturing, replaying;
      GpuRank rank(first, c, {.memory = blocks.memory()});
      MovableStep kept(blocks.needs, problem), beside(blocks.needs, problem);
      const Graph graph(capturing, [&] {
        forward(rank.layer(), rank, kept, schedule, capturing.get());
        kept.move(capturing.get());
        backward(rank.layer(), rank, kept, schedule, capturing.get());
        kept.move(capturing.get());  // back to where the next replay has it
      });
      for (unsigned seed = 2; seed < 2 + static_cast<unsigned>(rounds(c.size())); ++seed) {
        const LayerData batch = small_layer(c.size(), seed);
        own.load(batch);
        const LayerResult want = own.step(cuda_schedules()[0]);
        rank.load(batch);
        if (seed % 3 == 0) {
          forward(rank.layer(), rank, beside, schedule, replaying.get());
          graph.replay_on(replaying.get());
          backward(rank.layer(), rank, beside, schedule, replaying.get());
        } else {
          graph.replay_on(replaying.get());
        }
        const std::string tensor = difference(rank.result(), want);
        if (!tensor.empty()) return cat(tensor, " differs in step ", seed);
      }
    }
    return "same";
  }));
}

}  // namespace
}  // namespace uniep::testing
