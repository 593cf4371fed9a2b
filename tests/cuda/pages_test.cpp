// Saved rows in pages of a row pool, on GPUs: the bytes are those of steps in memory of their own,
// pages are taken and given back on the device, in CUDA graphs too, and a pool that is too full is
// found alike on all ranks. A process for each rank.
#include <algorithm>
#include <deque>
#include <memory>
#include <thread>

#include "cuda/cuda_schedules.h"
#include "cuda/gpu_group.h"
#include "cuda/gpu_rank.h"
#include "cuda/graph.h"
#include "cuda/row_pool.h"
#include "layout/page_pool.h"

namespace uniep::testing {
namespace {

class CudaPages : public OnGpus {};
INSTANTIATE_TEST_SUITE_P(Gpus, CudaPages, ::testing::Values(1, 2, 4), ranks_name);

constexpr const char* kSame = "same";

Problem problem_of(const LayerData& data, int ranks, const GpuRankOptions& extra = {}) {
  Problem p = workload::Split(data, ranks).problem();
  p.save = extra.save;
  p.recompute_h = extra.recompute_h;
  return p;
}

/// Pages that a plan of any routing takes at most.
std::int64_t pages_of_a_plan(const Problem& p, int ranks) {
  const std::int64_t rows = capacity_rows(p, ranks);
  return page_shape(p).pages_of(rows, most_received(p, ranks, rows));
}

RowPool pool_of(const Problem& p, const Communicator& c, std::int64_t pages) {
  return RowPool(p, c, {.bytes = PagePoolLayout(p, pages).bytes});
}

/// All page numbers are on the stack, each once; "" where that is so.
std::string lost_pages(const RowPool& pool) {
  if (pool.free_pages() != pool.pages()) {
    return cat(pool.free_pages(), " of ", pool.pages(), " pages are free");
  }
  std::vector<std::int32_t> pages = download(pool.data()->stack().pages, pool.pages());
  std::ranges::sort(pages);
  for (std::int64_t i = 0; i < pool.pages(); ++i) {
    if (pages[static_cast<std::size_t>(i)] != i) return cat("page ", i, " is lost");
  }
  return "";
}

// ---- The same bytes

/// Whatever is kept, under every preset, whole or in parts; pages are others than rows' numbers.
TEST_P(CudaPages, GiveTheBytesOfMemoryOfTheirOwn) {
  for (const Save save : kSaves) {
    for (const bool recompute_h : {false, true}) {
      const GpuRankOptions extra{.save = save, .recompute_h = recompute_h};
      expect_same(on_gpus(ranks(), [&](const Communicator& c) -> std::string {
        const int shared = recompute_h ? 2 : 0;
        const LayerData first = small_layer(c.size(), 1, shared);
        const Problem problem = problem_of(first, c.size(), extra);
        const RowPool pool = pool_of(problem, c, 3 * pages_of_a_plan(problem, c.size()));
        GpuRank own(first, c, {}, extra);
        GpuRank paged(first, c, {.row_pool = pool}, extra);
        unsigned seed = 0;
        for (const Schedule& schedule : cuda_schedules()) {
          for (const bool in_parts : {false, true}) {
            const LayerData batch = small_layer(c.size(), ++seed, shared);
            own.load(batch);
            paged.load(batch);
            const LayerResult want = own.step(cuda_schedules()[0]);
            (void)paged.layer().plan(paged.topk_ids());  // goes back in another order
            const RoutingPlan held = paged.layer().plan(paged.topk_ids());
            paged.forget_results();
            paged.plan();
            paged.forward(schedule);
            if (in_parts) {
              paged.backward_data(schedule);
              paged.backward_weights(schedule);
            } else {
              paged.backward(schedule);
            }
            const std::string tensor = difference(paged.result(), want);
            if (!tensor.empty()) {
              return cat(tensor, " differs, ", to_string(schedule), ", in parts ", in_parts);
            }
          }
        }
        const std::string lost = lost_pages(pool);
        return lost.empty() ? kSame : lost;
      }));
    }
  }
}

/// Forwards of two layers, on two streams, are outstanding; their backwards come in another order.
TEST_P(CudaPages, ServeOutstandingForwardsOfSeveralLayers) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    constexpr int kSteps = 6;
    const LayerData first = small_layer(c.size());
    const Problem problem = problem_of(first, c.size());
    const RowPool pool = pool_of(problem, c, kSteps * pages_of_a_plan(problem, c.size()));
    GpuRank own(first, c);
    const Stream streams[2];
    std::deque<Layer> layers;
    for (const Stream& stream : streams) {
      layers.emplace_back(problem, c, LayerOptions{.cuda_stream = stream.get(), .row_pool = pool});
    }
    for (unsigned round = 0; round < 3; ++round) {
      std::deque<GpuRank> tensors;
      std::vector<LayerResult> want;
      std::vector<Saved> saved;
      std::int64_t rows = 0;
      for (unsigned i = 0; i < kSteps; ++i) {
        const LayerData batch = small_layer(c.size(), kSteps * round + i + 1);
        own.load(batch);
        want.push_back(own.step(cuda_schedules()[0]));
        tensors.emplace_back(batch, c);
        tensors.back().forget_results();  // waits for what was uploaded
        Layer& layer = layers[i % 2];
        const RoutingPlan plan = layer.plan(tensors.back().topk_ids());
        saved.push_back(layer.forward(plan, tensors.back().forward_args()));
        rows += plan.padded_rows();
      }
      if (pool.pages() - pool.free_pages() != rows / problem.row_align) {
        return cat(pool.pages() - pool.free_pages(), " pages for ", rows, " rows");
      }
      for (const unsigned i : {3u, 0u, 5u, 1u, 4u, 2u}) {
        layers[i % 2].backward(saved[i], tensors[i].backward_args());
      }
      for (unsigned i = 0; i < kSteps; ++i) {
        layers[i % 2].synchronize();
        const std::string tensor = difference(tensors[i].tensors(), want[i]);
        if (!tensor.empty()) return cat(tensor, " differs in step ", i, " of round ", round);
      }
      if (const std::string lost = lost_pages(pool); !lost.empty()) return lost;
    }
    return kSame;
  }));
}

class CudaPagesOfOneRank : public OnGpus {};
INSTANTIATE_TEST_SUITE_P(Gpus, CudaPagesOfOneRank, ::testing::Values(1), ranks_name);

/// Layers of one rank may run side by side: what one thread takes, another does not give away.
TEST_P(CudaPagesOfOneRank, ServeLayersOfTwoThreads) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData first = small_layer(c.size());
    const Problem problem = problem_of(first, c.size());
    const RowPool pool = pool_of(problem, c, 4 * pages_of_a_plan(problem, c.size()));
    GpuRank own(first, c);
    const LayerResult want = own.step(cuda_schedules()[0]);
    const Stream streams[2];  // which the pool waits for as long as it serves
    std::string differs[2];
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&, &stream = streams[i], &found = differs[i]] {
        GpuRank paged(first, c, {.cuda_stream = stream.get(), .row_pool = pool});
        for (int step = 0; step < 300 && found.empty(); ++step) {
          paged.forget_results();
          paged.plan();
          paged.forward(cuda_schedules()[0]);
          paged.backward_data(cuda_schedules()[0]);
          paged.backward_weights(cuda_schedules()[0]);
          found = difference(paged.result(), want);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& found : differs) {
      if (!found.empty()) return cat(found, " differs");
    }
    const std::string lost = lost_pages(pool);
    return lost.empty() ? kSame : lost;
  }));
}

/// A graph of a whole step, and graphs of its parts, replayed with routings that bring other
/// numbers of rows each time.
TEST_P(CudaPages, AreTakenAndGivenBackInGraphs) {
  for (const bool in_two : {false, true}) {
    expect_same(on_gpus(ranks(), [&](const Communicator& c) -> std::string {
      const LayerData first = small_layer(c.size());
      const Problem problem = problem_of(first, c.size());
      const RowPool pool = pool_of(problem, c, 2 * pages_of_a_plan(problem, c.size()));
      const Schedule schedule = cuda_schedules().back();
      GpuRank own(first, c);
      const Stream stream;
      {
        GpuRank rank(first, c, {.cuda_stream = stream.get(), .row_pool = pool});
        std::vector<std::unique_ptr<Graph>> graphs;
        const auto forward = [&] { rank.plan(), rank.forward(schedule); };
        const auto backward = [&] { rank.backward(schedule); };
        if (in_two) {
          graphs.push_back(std::make_unique<Graph>(stream, forward));
          graphs.push_back(std::make_unique<Graph>(stream, backward));
        } else {
          graphs.push_back(std::make_unique<Graph>(stream, [&] { forward(), backward(); }));
        }
        const int replays = sharing(c.size()) ? 4 : 12;
        for (int i = 1; i <= replays; ++i) {
          LayerData batch = small_layer(c.size(), static_cast<unsigned>(i));
          for (std::size_t s = 0; s < batch.topk_ids.size(); ++s) {
            if (s % static_cast<std::size_t>(i + 1) == 0) batch.topk_ids[s] = -1;
          }
          own.load(batch);
          const LayerResult want = own.step(schedule);
          rank.load(batch);
          for (const auto& graph : graphs) graph->replay();
          const std::string tensor = difference(rank.result(), want);
          if (!tensor.empty()) return cat(tensor, " differs in replay ", i);
          if (const std::string lost = lost_pages(pool); !lost.empty()) return lost;
        }
        if (in_two) graphs[0]->replay();  // whose backward never comes
        rank.layer().synchronize();
      }
      const std::string lost = lost_pages(pool);
      return lost.empty() ? kSame : lost;
    }));
  }
}

// ---- When pages go back

TEST_P(CudaPages, GoBackOnceBehindBackwardOrWithTheEndOfWhatHasThem) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData data = small_layer(c.size());
    const Problem problem = problem_of(data, c.size());
    const RowPool pool = pool_of(problem, c, 3 * pages_of_a_plan(problem, c.size()));
    GpuRank rank(data, c, {.row_pool = pool});
    Layer& layer = rank.layer();
    const auto held = [&] { return pool.pages() - pool.free_pages(); };
    std::int64_t pages = 0;
    {
      const RoutingPlan plan = layer.plan(rank.topk_ids());
      pages = plan.padded_rows() / problem.row_align;
      if (held() != pages) return cat("a plan holds ", held(), " pages of ", pages);
    }
    if (held() != 0) return "the end of a plan gives none back";
    const RoutingPlan kept = layer.plan(rank.topk_ids());
    { const Saved saved = layer.forward(kept, rank.forward_args()); }
    if (held() != 0) return "the end of what forward saved gives none back";

    const Saved saved = layer.forward(layer.plan(rank.topk_ids()), rank.forward_args());
    CallOptions keep;
    keep.keep_pages = true;
    layer.backward(saved, rank.backward_args(), keep);
    if (held() != pages) return "a backward pass that keeps its pages does not";
    layer.backward(saved, rank.backward_args());
    if (held() != 0) return "a backward pass gives none back";
    if (c.size() > 1) return kSame;  // a refusal on GPUs ends a group
    const std::string said =
        failure_of([&] { layer.backward(saved, rank.backward_args()); }, std::chrono::seconds(30));
    if (said.find("saved has no pages any more") == std::string::npos) return said;
    const std::string lost = lost_pages(pool);
    return lost.empty() ? kSame : lost;
  }));
}

// ---- Pools that are too full

/// That of rank 0 is too small for a second step. All ranks hear of it, nothing is taken, and the
/// layer goes on.
void expect_refused_alike(int ranks, Save save, bool recompute_h) {
  const GpuRankOptions extra{.save = save, .recompute_h = recompute_h};
  expect_same(on_gpus(ranks, [&](const Communicator& c) -> std::string {
    const LayerData data = small_layer(c.size());
    const Problem problem = problem_of(data, c.size(), extra);
    GpuRank own(data, c, {}, extra);
    const LayerResult want = own.step(cuda_schedules()[0]);
    const std::int64_t pages = page_shape(problem).pages_of(own.last_plan().padded_rows(),
                                                            own.last_plan().received_tokens());
    const RowPool pool = pool_of(problem, c, c.rank() == 0 ? 2 * pages - 1 : 4 * pages + 64);
    GpuRank rank(data, c, {.row_pool = pool}, extra);
    Layer& layer = rank.layer();
    rank.plan();
    rank.forward(cuda_schedules()[0]);
    const std::int64_t free = pool.free_pages();

    const DeviceMemory overflow(2 * sizeof(std::int64_t));
    auto* flag = reinterpret_cast<std::int64_t*>(overflow.data());
    {
      const RoutingPlan none = layer.plan(rank.topk_ids(), {.overflow = flag});
      layer.synchronize();
      const std::vector<std::int64_t> told = download(flag, 2);
      if (told[0] != 3) return cat("overflow is ", told[0]);
      if (c.rank() == 0 && told[1] != bytes_for_pages(page_bytes(problem), 2 * pages)) {
        return cat("overflow names ", told[1], " bytes");
      }
      if (pool.free_pages() != free) return "a plan that was refused took pages";
    }
    const std::string said = failure_of(
        [&] {
          (void)layer.plan(rank.topk_ids());
          layer.synchronize();
        },
        std::chrono::seconds(30));
    const std::string begin = c.size() == 1
                                  ? cat("rank 0 would save ", pages, " pages, but ", pages,
                                        " of the ", 2 * pages - 1, " pages of its row pool")
                                  : std::string("rank 0 would save ");
    if (said.rfind(begin, 0) != 0) return said;
    rank.backward(cuda_schedules()[0]);
    const std::string tensor = difference(rank.result(), want);
    if (!tensor.empty()) return cat(tensor, " differs");
    rank.step(cuda_schedules()[0]);
    const std::string lost = lost_pages(pool);
    return lost.empty() ? kSame : lost;
  }));
}

TEST_P(CudaPages, OfAFullPoolAreRefusedOnAllRanksAlike) {
  expect_refused_alike(ranks(), Save::kRows, false);
}
TEST_P(CudaPages, OfAFullPoolOfTokensAreRefusedOnAllRanksAlike) {
  expect_refused_alike(ranks(), Save::kTokens, false);
  expect_refused_alike(ranks(), Save::kTokens, true);
}

}  // namespace
}  // namespace uniep::testing
