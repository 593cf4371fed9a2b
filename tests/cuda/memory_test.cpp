// The caller's memory, streams of calls, bf16 main gradients and overflow as values, on GPUs: the
// bytes are those of steps in uniep's memory on one stream. A process for each rank.
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <memory>
#include <thread>

#include "base/math.h"
#include "cuda/cuda_schedules.h"
#include "cuda/gpu_group.h"
#include "cuda/gpu_rank.h"
#include "cuda/graph.h"
#include "cuda/overflow_batches.h"

namespace uniep::testing {
namespace {

class CudaMemory : public OnGpus {};
INSTANTIATE_TEST_SUITE_P(Gpus, CudaMemory, ::testing::Values(1, 2, 4), ranks_name);

int rounds(int ranks) { return sharing(ranks) ? 2 : 8; }

/// A block whose contents can be moved on a stream, as PyTorch moves tensors.
class Movable {
 public:
  explicit Movable(std::int64_t bytes)
      : bytes_(bytes), here_(std::make_unique<DeviceMemory>(bytes)), there_(nullptr) {}

  /// To another address; what stays behind is spoilt.
  void move(cudaStream_t stream) {
    if (there_ == nullptr) there_ = std::make_unique<DeviceMemory>(bytes_);
    const auto bytes = static_cast<std::size_t>(bytes_);
    cuda::check_cuda(
        cudaMemcpyAsync(there_->data(), here_->data(), bytes, cudaMemcpyDeviceToDevice, stream),
        "move");
    cuda::check_cuda(cudaMemsetAsync(here_->data(), 0xff, bytes, stream), "spoil");
    std::swap(here_, there_);
  }
  /// So that `move` allocates nothing.
  void make_room() { there_ = std::make_unique<DeviceMemory>(bytes_); }

  std::span<std::byte> bytes() const { return {here_->data(), static_cast<std::size_t>(bytes_)}; }
  template <class T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(here_->data()), static_cast<std::size_t>(bytes_) / sizeof(T)};
  }

 private:
  std::int64_t bytes_;
  std::unique_ptr<DeviceMemory> here_, there_;
};

/// What a step keeps.
struct MovableStep {
  MovableStep(const MemoryNeeds& n, const Problem& p)
      : plan(n.plan),
        x_rows(n.rows * p.hidden * 2),
        h(n.rows * 2 * p.intermediate * 2),
        row_probs(n.rows * 4),
        forward_rows(n.forward_rows),
        backward_rows(n.backward_rows) {
    for (Movable* m : all()) m->make_room();
  }

  void move(cudaStream_t stream) {
    for (Movable* m : all()) m->move(stream);
  }
  StepMemory memory(bool with_backward_rows = true) const {
    StepMemory m{.plan = plan.bytes(),
                 .x_rows = x_rows.as<bf16>(),
                 .h = h.as<bf16>(),
                 .row_probs = row_probs.as<float>(),
                 .forward_rows = forward_rows.bytes()};
    if (with_backward_rows) m.backward_rows = backward_rows.bytes();
    return m;
  }
  std::array<Movable*, 6> all() {
    return {&plan, &x_rows, &h, &row_probs, &forward_rows, &backward_rows};
  }

  Movable plan, x_rows, h, row_probs, forward_rows, backward_rows;
};

/// The layer's memory of one rank.
struct LayerBlocks {
  explicit LayerBlocks(const MemoryNeeds& n)
      : needs(n), workspace(n.workspace), symmetric(n.symmetric) {}

  LayerMemory memory() const {
    return {.workspace = {workspace.data(), static_cast<std::size_t>(needs.workspace)},
            .symmetric = {symmetric.data(), static_cast<std::size_t>(needs.symmetric)}};
  }

  MemoryNeeds needs;
  DeviceMemory workspace, symmetric;
};

Problem problem_of(const LayerData& data, int ranks, std::int64_t capacity = 0) {
  Problem p = workload::Split(data, ranks).problem();
  p.capacity_rows = capacity;
  return p;
}

MemoryNeeds needs_of(const Problem& problem, int ranks) {
  return Layer::memory_needs(problem, Backend::kCuda, ranks);
}

/// Plan and forward of the tensors of `t`, in the memory of `kept`.
void forward(Layer& layer, const GpuRank& t, const MovableStep& kept, const Schedule& schedule,
             std::optional<void*> stream = {}, std::int64_t* overflow = nullptr) {
  const CallOptions options{
      .schedule = schedule, .cuda_stream = stream, .memory = kept.memory(), .overflow = overflow};
  (void)layer.forward(layer.plan(t.topk_ids(), options), t.forward_args(), options);
}

void backward(Layer& layer, const GpuRank& t, const MovableStep& kept, const Schedule& schedule,
              std::optional<void*> stream = {}, bool flagged = false) {
  const Saved saved = layer.restore(kept.memory(false), t.tokens(), flagged);
  layer.backward(saved, t.backward_args(),
                 {.schedule = schedule, .cuda_stream = stream, .memory = kept.memory()});
}

// ---- Whose memory

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

// ---- Streams

/// Each call is on another stream, and the host waits for nothing in between: rows of one step are
/// moved on the stream of the call before.
TEST_P(CudaMemory, CallsOnDifferentStreamsRunInTheirOrder) {
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
TEST_P(CudaMemory, CallsOfLayersRunInTheOrderInWhichTheyAreMade) {
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

/// A step whose saved tensors are moved within the graph; it is replayed on another stream than the
/// one that captured it, in turns with steps that are not captured.
TEST_P(CudaMemory, GraphsInTheCallersMemoryAreReplayedOnAnyStream) {
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

// ---- bf16 main gradients

std::vector<bf16> rounded_sums(const std::vector<float>& sums, const std::vector<bf16>& old) {
  std::vector<bf16> result;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    // Nothing was added to this -0, or a -0, which changes no bf16 number either.
    const bool kept = std::bit_cast<std::uint32_t>(sums[i]) == 0x80000000u;
    result.push_back(kept ? old[i] : to_bf16(to_float(old[i]) + sums[i]));
  }
  return result;
}

/// A gradient is added to -0 in fp32, so that what no sum was added to is known: -0 + sum is the
/// sum.
TEST_P(CudaMemory, Bf16MainGradientsAreRoundedOnceACall) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    LayerData data = small_layer(c.size());
    for (auto& id : data.topk_ids) id = id == 1 ? -1 : id;  // expert 1 gets nothing
    GpuRank rank(data, c);
    const BackwardArgs args = rank.backward_args();
    const std::size_t n1 = args.w1.size(), n2 = args.w2.size();
    const std::vector<float> zeros1(n1, -0.0f), zeros2(n2, -0.0f);
    const DeviceTensor<float> sums1{std::span<const float>(zeros1)},
        sums2{std::span<const float>(zeros2)};
    std::vector<bf16> want1(n1, to_bf16(1.5f)), want2(n2, bf16{0x8000});
    const DeviceTensor<bf16> main1{std::span<const bf16>(want1)},
        main2{std::span<const bf16>(want2)};
    cuda::check_cuda(cudaDeviceSynchronize(), "upload");
    rank.plan();
    rank.forward(cuda_schedules().back());
    Saved saved = rank.layer().forward(rank.last_plan(), rank.forward_args());
    BackwardArgs into_fp32 = args;
    into_fp32.dw1 = sums1.span();
    into_fp32.dw2 = sums2.span();
    rank.layer().backward(saved, into_fp32);
    rank.layer().synchronize();
    for (Schedule schedule : cuda_schedules()) {
      for (const int tile_n : {128, 256}) {
        schedule.tile_n = tile_n;
        BackwardArgs into_bf16 = args;
        into_bf16.dw1 = Bf16MainGrad{main1.span()};
        into_bf16.dw2 = Bf16MainGrad{main2.span()};
        rank.layer().backward(saved, into_bf16, schedule);
        want1 = rounded_sums(sums1.to_host(), want1);
        want2 = rounded_sums(sums2.to_host(), want2);
        rank.layer().synchronize();
        if (main1.to_host() != want1) return cat("dw1 differs, ", to_string(schedule));
        if (main2.to_host() != want2) return cat("dw2 differs, ", to_string(schedule));
      }
    }
    // One of them overwritten, as ever.
    BackwardArgs mixed = args;
    mixed.dw2 = Bf16MainGrad{main2.span()};
    rank.layer().backward(saved, mixed);
    want2 = rounded_sums(sums2.to_host(), want2);
    const LayerResult got = rank.result();
    if (main2.to_host() != want2) return "dw2 differs beside an overwritten dw1";
    GpuRank plain(data, c);
    if (got.dw1 != plain.step(cuda_schedules()[0]).dw1) return "dw1 differs beside a main_grad";
    return "same";
  }));
}

TEST(CudaMemoryAlone, MainGradientsOfTwoTypesAreRefused) {
  if (!gpus_for(1)) GTEST_SKIP() << needs_gpus(1);
  expect_same(on_gpus(1, [](const Communicator& c) -> std::string {
    const LayerData data = small_layer(1);
    GpuRank rank(data, c);
    BackwardArgs args = rank.backward_args();
    const DeviceTensor<float> fp32(args.w1.size());
    args.dw1 = fp32.span();
    args.dw2 = Bf16MainGrad{std::get<ExpertMatrices<bf16>>(args.dw2)};
    rank.plan();
    const Saved saved = rank.layer().forward(rank.last_plan(), rank.forward_args());
    const std::string said =
        failure_of([&] { rank.layer().backward(saved, args); }, std::chrono::seconds(60));
    const bool names_both = said.find("added to in fp32 and in bf16") != said.npos;
    return said.starts_with("rank 0: ") && names_both ? "same" : said;
  }));
}

// ---- A routing that cannot be planned, as values

/// Rows of the fullest rank, padding included.
std::int64_t rows_of(const LayerData& data, int ranks) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(data.num_experts));
  for (const std::int32_t id : data.topk_ids) {
    if (id >= 0) ++rows[static_cast<std::size_t>(id)];
  }
  const std::size_t local = rows.size() / static_cast<std::size_t>(ranks);
  std::int64_t most = 0;
  for (std::size_t first = 0; first < rows.size(); first += local) {
    std::int64_t of_rank = 0;
    for (std::size_t e = first; e < first + local; ++e) {
      of_rank += round_up<std::int64_t>(rows[e], Problem{}.row_align);
    }
    most = std::max(most, of_rank);
  }
  return most;
}

/// What is wrong with results of a step that cannot be planned, or "".
std::string values_of_fault(const LayerResult& r, bool main_grad) {
  for (const bf16 v : r.out) {
    if (!std::isnan(to_float(v))) return "out is not NaN";
  }
  for (const bf16 v : r.dx) {
    if (v != bf16{0x7fc0}) return "dx is not the NaN of a fault";
  }
  for (const float v : r.dprobs) {
    if (v != 0) return "dprobs is not 0";
  }
  for (const auto* dw : {&r.dw1, &r.dw2}) {
    for (const bf16 v : *dw) {
      if (v.bits != 0) return "a weight gradient is not 0";
    }
  }
  for (const auto* dw : {&r.main_dw1, &r.main_dw2}) {
    for (const float v : *dw) {
      if (main_grad && v != GpuRank::kMainGradStart) return "a main_grad was added to";
    }
  }
  return "";
}

using Values = std::array<std::int64_t, 2>;

/// Runs `step` on batches that fit, that do not, and that have an impossible id.
std::string steps_with_overflow(const Communicator& c, GpuRank& rank, bool main_grad,
                                const DeviceTensor<std::int64_t>& overflow,
                                const std::function<void()>& step) {
  const LayerData fits = fitting_batch(c.size()), does_not = overflowing_batch(c.size());
  LayerData impossible = fits;
  impossible.topk_ids[3] = impossible.num_experts;
  GpuRank own(fits, c, {}, {.main_grad = main_grad});
  const LayerResult want = own.step(cuda_schedules()[0]);
  const struct {
    const LayerData& batch;
    Values values;
  } cases[] = {{fits, {0, rows_of(fits, c.size())}},
               {does_not, {1, rows_of(does_not, c.size())}},
               {fits, {0, rows_of(fits, c.size())}},
               {impossible, {2, 0}},
               {fits, {0, rows_of(fits, c.size())}}};
  for (const auto& [batch, values] : cases) {
    rank.load(batch);
    step();
    rank.layer().synchronize();  // throws for none of them
    const std::vector<std::int64_t> got = overflow.to_host();
    if (got[0] != values[0] || got[1] != values[1]) {
      return cat("overflow is ", got[0], ", ", got[1], " instead of ", values[0], ", ", values[1]);
    }
    const LayerResult result = rank.tensors();
    const std::string wrong =
        values[0] == 0 ? difference(result, want) : values_of_fault(result, main_grad);
    if (!wrong.empty()) return cat(wrong, ", overflow ", values[0]);
  }
  return "same";
}

TEST_P(CudaMemory, AnOverflowIsAValueOnTheDevice) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData first = fitting_batch(c.size());
    const Problem problem = problem_of(first, c.size(), kCapacity);
    const DeviceTensor<std::int64_t> overflow(2);
    for (const bool main_grad : {false, true}) {
      for (const bool in_two : {false, true}) {
        for (const Schedule& schedule : cuda_schedules()) {
          const LayerBlocks blocks(needs_of(problem, c.size()));
          GpuRank rank(first, c, {.memory = blocks.memory()},
                       {.capacity_rows = kCapacity, .main_grad = main_grad});
          const MovableStep kept(blocks.needs, problem);
          const auto step = [&] {
            forward(rank.layer(), rank, kept, schedule, {}, overflow.span().data());
            if (!in_two) return backward(rank.layer(), rank, kept, schedule, {}, true);
            Saved saved = rank.layer().restore(kept.memory(false), rank.tokens(), true);
            rank.layer().backward_data(saved, data_args(rank.backward_args()),
                                       {.schedule = schedule, .memory = kept.memory()});
            rank.layer().backward_weights(saved, weights_args(rank.backward_args()), schedule);
          };
          const auto said = steps_with_overflow(c, rank, main_grad, overflow, step);
          if (said != "same") {
            return cat(said, ", main_grad ", main_grad, ", in_two ", in_two, ", ",
                       to_string(schedule));
          }
        }
      }
    }
    return "same";
  }));
}

TEST_P(CudaMemory, AnOverflowInAReplayIsAValueOnTheDevice) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData first = fitting_batch(c.size());
    const DeviceTensor<std::int64_t> overflow(2);
    for (const Schedule& schedule : cuda_schedules()) {
      const Stream stream;
      GpuRank rank(first, c, {.cuda_stream = stream.get()}, {.capacity_rows = kCapacity});
      std::optional<RoutingPlan> plan;
      Saved saved;
      const Graph graph(stream, [&] {
        plan = rank.layer().plan(rank.topk_ids(), {.overflow = overflow.span().data()});
        saved = rank.layer().forward(*plan, rank.forward_args(), schedule);
        rank.layer().backward(saved, rank.backward_args(), schedule);
      });
      const auto said = steps_with_overflow(c, rank, false, overflow, [&] { graph.replay(); });
      if (said != "same") return cat(said, ", ", to_string(schedule));
    }
    return "same";
  }));
}

}  // namespace
}  // namespace uniep::testing
