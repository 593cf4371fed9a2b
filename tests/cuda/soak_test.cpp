// 2,000 steps (200 where ranks share GPUs) on the same layers, a process for each rank: changing
// numbers of tokens, routing and schedules, delays in kernels and on hosts. Every step has the
// bytes of a layer that runs `sequential` undisturbed, no wait expires, and no memory grows.
#include "support/soak.h"

#include <thread>

#include "cuda/cuda_schedules.h"
#include "cuda/gpu_group.h"
#include "cuda/gpu_rank.h"
#include "layer/arguments.h"
#include "support/cases.h"

namespace uniep::testing {
namespace {

constexpr int kSteps = 2000;
constexpr int kSharedSteps = 200;
/// Steps that may still take memory which later ones use again.
constexpr int kWarmUp = 100;
/// A step's smallest buffer, kept once in ten steps, would be more.
constexpr std::int64_t kMayGrow = 8 << 20;

/// A layer and room for the tensors of any step.
class SoakLayer {
 public:
  SoakLayer(const SoakSteps& steps, const Communicator& c, const LayerOptions& options)
      : problem_(steps.problem()),
        experts_(static_cast<std::size_t>(problem_.num_experts / c.size())),
        layer_(problem_, c, options) {}

  /// This rank's parts of `result`.
  void run(const workload::Split& split, bool defer_weights, const Schedule& schedule,
           LayerResult& result) {
    const int rank = layer_.communicator().rank();
    const ForwardArgs f = split.forward_args(rank, result);
    const BackwardArgs b = split.backward_args(rank, result);
    const auto ids = load(ids_, split.topk_ids(rank));
    const auto w1 = load(w1_, f.w1.tensor());
    const auto w2 = load(w2_, f.w2.tensor());
    const ForwardArgs forward{.x = load(x_, f.x),
                              .topk_probs = load(probs_, f.topk_probs),
                              .w1 = w1,
                              .w2 = w2,
                              .out = forgotten(out_, f.out.size())};
    BackwardArgs backward;
    backward.dy = load(dy_, b.dy);
    backward.w1 = w1;
    backward.w2 = w2;
    backward.dx = forgotten(dx_, b.dx.size());
    backward.dprobs = forgotten(dprobs_, b.dprobs.size());
    backward.dw1 = forgotten(dw1_, f.w1.size());
    backward.dw2 = forgotten(dw2_, f.w2.size());
    cuda::check_cuda(cudaDeviceSynchronize(), "load a step");

    const RoutingPlan plan = layer_.plan(ids);
    Saved saved = layer_.forward(plan, forward, schedule);
    if (defer_weights) {
      layer_.backward_data(saved, data_args(backward), schedule);
      layer_.backward_weights(saved, weights_args(backward), schedule);
    } else {
      layer_.backward(saved, backward, schedule);
    }
    layer_.synchronize();
    read(f.out, out_);
    read(b.dx, dx_);
    read(b.dprobs, dprobs_);
    read(std::get<ExpertMatrices<bf16>>(b.dw1).tensor(), dw1_);
    read(std::get<ExpertMatrices<bf16>>(b.dw2).tensor(), dw2_);
  }

 private:
  std::size_t tokens_of(std::int64_t width) const {
    return static_cast<std::size_t>(problem_.max_tokens * width);
  }
  std::size_t weights(std::int64_t halves) const {
    return experts_ * static_cast<std::size_t>(halves * problem_.intermediate * problem_.hidden);
  }

  template <class T>
  static std::span<T> load(const DeviceTensor<T>& tensor, std::span<const T> values) {
    tensor.load(values);
    return tensor.span().first(values.size());
  }
  template <class T>
  static std::span<T> forgotten(const DeviceTensor<T>& tensor, std::size_t count) {
    tensor.forget();
    return tensor.span().first(count);
  }
  template <class T>
  static void read(std::span<T> to, const DeviceTensor<T>& from) {
    if (to.empty()) return;
    cuda::check_cuda(
        cudaMemcpy(to.data(), from.span().data(), to.size_bytes(), cudaMemcpyDeviceToHost),
        "download");
  }

  const Problem problem_;
  const std::size_t experts_;
  const DeviceTensor<std::int32_t> ids_{tokens_of(problem_.topk)};
  const DeviceTensor<bf16> x_{tokens_of(problem_.hidden)}, dy_{tokens_of(problem_.hidden)};
  const DeviceTensor<float> probs_{tokens_of(problem_.topk)};
  const DeviceTensor<bf16> w1_{weights(2)}, w2_{weights(1)};
  const DeviceTensor<bf16> out_{tokens_of(problem_.hidden)}, dx_{tokens_of(problem_.hidden)};
  const DeviceTensor<float> dprobs_{tokens_of(problem_.topk)};
  const DeviceTensor<bf16> dw1_{weights(2)}, dw2_{weights(1)};
  Layer layer_;
};

/// One of the presets, or any point of the space, on all SMs.
Schedule soak_schedule(Rng& rng, const Problem& problem) {
  const std::vector<Schedule> presets = cuda_schedules();
  const auto preset = static_cast<std::size_t>(pick(rng, 0, 2 * presets.size() - 1));
  if (preset < presets.size()) return presets[preset];
  Schedule schedule = random_cuda_schedule(rng, problem);
  schedule.workers = 0;
  return schedule;
}

struct Memory {
  std::int64_t device = 0;
  std::int64_t host = 0;
};

Memory memory_in_use() {
  std::size_t free = 0;
  std::size_t total = 0;
  cuda::check_cuda(cudaMemGetInfo(&free, &total), "ask for free memory");
  return {static_cast<std::int64_t>(total - free), resident_bytes()};
}

std::string soak(const Communicator& c, bool sharing) {
  const SoakSteps steps(c.size(), 264, 136);
  const FaultInjection faults{.max_delay_us = 20, .seed = 7, .first_count = 0u - 500};
  SoakLayer disturbed(steps, c, {.timeout_ms = 20000, .fault_injection = faults});
  SoakLayer sequential(steps, c, {.timeout_ms = 20000});
  Rng own(static_cast<unsigned>(c.rank()));
  Memory warm;
  for (int number = 1; number <= cases(sharing ? kSharedSteps : kSteps); ++number) {
    SoakSteps::Step step = steps.step(number);
    const Schedule schedule = soak_schedule(step.rng, steps.problem());
    const workload::Split split(step.data, step.token_begin);
    LayerResult want = workload::make_result(step.data, {});
    LayerResult got = want;
    sequential.run(split, false, cuda_schedules()[0], want);
    if (chance(own, 5)) std::this_thread::sleep_for(std::chrono::milliseconds(pick(own, 1, 10)));
    disturbed.run(split, step.defer_weights, schedule, got);
    const std::string tensor = difference(got, want);
    if (!tensor.empty()) return cat(tensor, " differs in step ", number, ", ", to_string(schedule));
    if (number == kWarmUp) warm = memory_in_use();
  }
  if (warm.device == 0) return "same";  // fewer steps were asked for
  const Memory last = memory_in_use();
  if (last.device - warm.device > kMayGrow) {
    return cat("device memory grew by ", last.device - warm.device, " bytes");
  }
  if (last.host - warm.host > kMayGrow) {
    return cat("host memory grew by ", last.host - warm.host, " bytes");
  }
  return "same";
}

class CudaSoak : public OnGpus {};
INSTANTIATE_TEST_SUITE_P(Gpus, CudaSoak, ::testing::Values(1, 2, 4, 8), ranks_name);

TEST_P(CudaSoak, EveryStepHasTheBytesOfSequentialAndMemoryDoesNotGrow) {
  const bool shared = sharing(ranks());
  expect_same(on_gpus(ranks(), [&](const Communicator& c) { return soak(c, shared); }));
}

}  // namespace
}  // namespace uniep::testing
