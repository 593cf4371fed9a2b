// The caller's memory on GPUs: the bytes are those of steps in uniep's. A process for each rank.
#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "cuda/caller_memory.h"
#include "cuda/cuda_schedules.h"
#include "cuda/graph.h"

namespace uniep::testing {
namespace {

class CudaMemory : public OnGpus {};
INSTANTIATE_TEST_SUITE_P(Gpus, CudaMemory, ::testing::Values(1, 2, 4), ranks_name);

/// Three steps are outstanding on one workspace; what they saved is moved before their backward.
TEST_P(CudaMemory, OfTheCallerServesSeveralOutstandingSteps) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData first = small_layer(c.size());
    const Problem problem = problem_of(first, c.size());
    const LayerBlocks blocks(needs_of(problem, c.size()));
    GpuRank own(first, c);
    const Stream stream;
    LayerOptions options{.cuda_stream = stream.get(), .memory = blocks.memory()};
    GpuRank rank(first, c, options);
    std::vector<std::unique_ptr<GpuRank>> tensors;
    std::vector<MovableStep> kept;
    for (int i = 0; i < 3; ++i) {
      tensors.push_back(std::make_unique<GpuRank>(first, c));
      kept.emplace_back(blocks.needs, problem);
    }
    for (const Schedule& schedule : cuda_schedules()) {
      std::vector<LayerResult> want;
      for (unsigned i = 0; i < 3; ++i) {
        const LayerData batch = small_layer(c.size(), i + 1);
        own.load(batch);
        want.push_back(own.step(cuda_schedules()[0]));
        tensors[i]->load(batch);
      }
      for (std::size_t i = 0; i < 3; ++i) {
        forward(rank.layer(), *tensors[i], kept[i], schedule);
      }
      for (MovableStep& k : kept) k.move(stream.get());
      for (const std::size_t i : {1u, 0u, 2u}) {
        backward(rank.layer(), *tensors[i], kept[i], schedule);
      }
      rank.layer().synchronize();
      for (std::size_t i = 0; i < 3; ++i) {
        const std::string tensor = difference(tensors[i]->tensors(), want[i]);
        if (!tensor.empty()) return cat(tensor, " differs in step ", i, ", ", to_string(schedule));
      }
    }
    return "same";
  }));
}

TEST(CudaMemoryAlone, CallsInTheCallersMemoryAllocateNothing) {
  if (!gpus_for(1)) GTEST_SKIP() << needs_gpus(1);
  expect_same(on_gpus(1, [](const Communicator& c) -> std::string {
    const LayerData data = small_layer(1);
    const Problem problem = problem_of(data, 1);
    const LayerBlocks blocks(needs_of(problem, 1));
    GpuRank rank(data, c, {.memory = blocks.memory()});
    MovableStep kept(blocks.needs, problem);
    const auto free_bytes = [] {
      std::size_t free = 0, total = 0;
      cuda::check_cuda(cudaMemGetInfo(&free, &total), "ask for free memory");
      return free;
    };
    cuda::check_cuda(cudaDeviceSynchronize(), "wait");
    const std::size_t before = free_bytes();
    for (const Schedule& schedule : cuda_schedules()) {
      forward(rank.layer(), rank, kept, schedule);
      backward(rank.layer(), rank, kept, schedule);
      Saved saved = rank.layer().restore(kept.memory(false), rank.tokens());
      rank.layer().backward_data(saved, data_args(rank.backward_args()),
                                 {.schedule = schedule, .memory = kept.memory()});
      rank.layer().backward_weights(saved, weights_args(rank.backward_args()), schedule);
    }
    rank.layer().synchronize();
    return free_bytes() == before ? "same" : "something was allocated";
  }));
}

/// Memory of the rows that came, which other steps in between have other numbers of.
TEST_P(CudaMemory, MayHaveTheRowsThatComeInsteadOfTheCapacity) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData first = small_layer(c.size());
    for (const Save save : kSaves) {
      Problem problem = problem_of(first, c.size());
      problem.save = save;
      problem.recompute_h = save == Save::kNone;
      const LayerBlocks blocks(needs_of(problem, c.size()));
      GpuRank own(first, c);
      GpuRank rank(first, c, {.memory = blocks.memory()},
                   {.save = problem.save, .recompute_h = problem.recompute_h});
      for (unsigned i = 0; i < 3; ++i) {
        const LayerData batch = small_layer(c.size(), i + 1);
        own.load(batch);
        const LayerResult want = own.step(cuda_schedules()[0]);
        rank.load(batch);
        for (const Schedule& schedule : cuda_schedules()) {
          rank.forget_results();
          const DeviceMemory plan_memory(blocks.needs.plan);
          const StepMemory of_plan{
              .plan = {plan_memory.data(), static_cast<std::size_t>(blocks.needs.plan)}};
          const RoutingPlan plan = rank.layer().plan(rank.topk_ids(), {.memory = of_plan});
          const std::int64_t rows = std::max<std::int64_t>(plan.padded_rows(), problem.row_align);
          if (rows >= blocks.needs.rows) return "the capacity leaves no room";
          const MovableStep kept(Layer::memory_needs(problem, Backend::kCuda, c.size(), rows),
                                 problem);
          StepMemory memory = kept.memory(false);
          memory.plan = of_plan.plan;
          const CallOptions options{.schedule = schedule, .memory = memory};
          (void)rank.layer().forward(plan, rank.forward_args(), options);
          Saved saved = rank.layer().restore(memory, rank.tokens());
          rank.layer().backward(saved, rank.backward_args(),
                                {.schedule = schedule, .memory = kept.memory()});
          rank.layer().synchronize();
          const std::string tensor = difference(rank.tensors(), want);
          if (!tensor.empty()) {
            return cat(tensor, " differs in batch ", i, ", save ", name(save), ", ",
                       to_string(schedule));
          }
        }
      }
    }
    return "same";
  }));
}

TEST(CudaMemoryAlone, WhatIsTooSmallOrMisalignedIsRefused) {
  if (!gpus_for(1)) GTEST_SKIP() << needs_gpus(1);
  expect_same(on_gpus(1, [](const Communicator& c) -> std::string {
    const LayerData data = small_layer(1);
    const Problem problem = problem_of(data, 1);
    const LayerBlocks blocks(needs_of(problem, 1));
    const auto said = [&](LayerMemory memory) {
      return failure_of([&] { Layer(problem, c, {.memory = std::move(memory)}); },
                        std::chrono::seconds(60));
    };
    LayerMemory memory = blocks.memory();
    memory.workspace = memory.workspace.first(memory.workspace.size() - 1);
    const std::string small = said(memory);
    if (small != cat("rank 0: memory.workspace has ", blocks.needs.workspace - 1, " bytes; ",
                     blocks.needs.workspace, " or more are accepted (Layer::memory_needs)")) {
      return small;
    }
    memory = blocks.memory();
    memory.symmetric = {memory.symmetric.data() + 16, memory.symmetric.size()};
    const std::string odd = said(memory);
    if (odd != cat("rank 0: memory.symmetric starts at address ",
                   reinterpret_cast<std::uintptr_t>(memory.symmetric.data()),
                   "; a multiple of 256 is accepted")) {
      return odd;
    }
    return "same";
  }));
}

}  // namespace
}  // namespace uniep::testing
