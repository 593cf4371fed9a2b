#include "run/cuda_step.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>

#include "base/check.h"
#include "common/interrupt.h"
#include "common/progress.h"
#include "cuda/device_array.h"
#include "group/cuda/cuda_communicator.h"
#include "group/gatherer.h"
#include "workload/split.h"

namespace uniep::tool {
namespace {

using cuda::DeviceArray;
using Clock = std::chrono::steady_clock;

template <class T>
DeviceArray<T> upload(std::span<const T> host) {
  return DeviceArray<T>(host);
}

template <class T>
void overwrite(const DeviceArray<T>& device, std::span<const T> host) {
  if (host.empty()) return;
  cuda::check_cuda(
      cudaMemcpy(device.data(), host.data(), host.size_bytes(), cudaMemcpyHostToDevice),
      "copy to the device");
}

template <class T>
void download(std::span<T> host, const DeviceArray<T>& device) {
  if (host.empty()) return;
  cuda::check_cuda(
      cudaMemcpy(host.data(), device.data(), host.size_bytes(), cudaMemcpyDeviceToHost),
      "copy from the device");
}

/// A weight gradient on the device and its place in the host's result.
struct DeviceGrad {
  WeightGrad host;
  DeviceArray<bf16> half;
  DeviceArray<float> full;

  explicit DeviceGrad(const WeightGrad& place) : host(place) { reset(); }

  /// What the host's buffer holds before a step: NaNs, or the main gradient's zeros.
  void reset() {
    if (const auto* span = std::get_if<ExpertMatrices<bf16>>(&host)) {
      half = upload(std::span<const bf16>(span->tensor()));
    } else {
      full = upload(std::span<const float>(std::get<ExpertMatrices<float>>(host).tensor()));
    }
  }
  WeightGrad device() const {
    if (std::holds_alternative<ExpertMatrices<bf16>>(host)) return half.span();
    return full.span();
  }
  void download_to(const WeightGrad& place) const {
    if (const auto* span = std::get_if<ExpertMatrices<bf16>>(&place)) {
      download(span->tensor(), half);
    } else {
      download(std::get<ExpertMatrices<float>>(place).tensor(), full);
    }
  }
};

/// This rank's part of all steps.
class CudaRank {
 public:
  CudaRank(const workload::Split& split, const StepOptions& options, const Communicator& member,
           Gatherer& gatherer, LayerResult& result)
      : split_(split),
        options_(options),
        gatherer_(gatherer),
        rank_(member.rank()),
        pool_(row_pool(layer_problem(split, options), options, member)),
        layer_(layer_problem(split, options), member,
               {.record_timeline = options.record_timeline,
                .schedule = options.schedule,
                .row_pool = pool_}),
        backward_(options.passes != PassChoice::kForward),
        ids_(upload(split.topk_ids(rank_))) {
    const ForwardArgs f = split.forward_args(rank_, result);
    x_ = upload(f.x);
    probs_ = upload(f.topk_probs);
    w1_ = upload(f.w1.tensor());
    w2_ = upload(f.w2.tensor());
    b1_ = upload(f.b1);
    b2_ = upload(f.b2);
    shared_w1_ = upload(f.shared_w1);
    shared_w2_ = upload(f.shared_w2);
    shared_probs_ = upload(f.shared_probs);
    if (!backward_) return;
    dy_ = upload(split.backward_args(rank_, result).dy);
  }

  struct Times {
    double plan_s = 0;
    PassStats forward;
    PassStats backward;
  };

  /// Poisons the outputs, runs a step and brings its results to `result`.
  Times step(LayerResult& result) {
    const ForwardArgs f = split_.forward_args(rank_, result);
    const DeviceArray<bf16> out = upload(std::span<const bf16>(f.out));
    Times times;
    // So that no pass is charged with the time that another rank took to prepare it.
    gatherer_.meet();
    const auto start = Clock::now();
    const RoutingPlan plan = layer_.plan(ids_.span());
    layer_.synchronize();
    times.plan_s = std::chrono::duration<double>(Clock::now() - start).count();
    gatherer_.meet();
    Saved saved = layer_.forward(plan,
                                 {.x = x_.span(),
                                  .topk_probs = probs_.span(),
                                  .w1 = w1_.span(),
                                  .w2 = w2_.span(),
                                  .out = out.span(),
                                  .b1 = b1_.span(),
                                  .b2 = b2_.span(),
                                  .shared_w1 = shared_w1_.span(),
                                  .shared_w2 = shared_w2_.span(),
                                  .shared_probs = shared_probs_.span()},
                                 schedule_of(options_, Pass::kForward));
    layer_.synchronize();
    times.forward = layer_.last_pass();
    download(f.out, out);
    if (!measures(options_.passes, Pass::kForward)) (void)layer_.take_timeline();
    if (backward_) step_backward(saved, result, times);
    note_routing(plan);
    timeline_ = layer_.take_timeline();
    return times;
  }

  const std::vector<std::int64_t>& rows_per_expert() const { return rows_per_expert_; }
  const Traffic& traffic() const { return traffic_; }
  PoolUse pool() const { return pool_use(pool_); }
  /// Of the last step.
  const std::vector<TimelineEvent>& last_timeline() const { return timeline_; }

 private:
  void step_backward(Saved& saved, LayerResult& result, Times& times) {
    clear_main_grad(split_, rank_, result);
    const BackwardArgs b = split_.backward_args(rank_, result);
    const DeviceArray<bf16> dx = upload(std::span<const bf16>(b.dx));
    const DeviceArray<float> dprobs = upload(std::span<const float>(b.dprobs));
    const DeviceGrad dw1(b.dw1);
    const DeviceGrad dw2(b.dw2);
    const DeviceGrad db1(b.db1);
    const DeviceGrad db2(b.db2);
    const DeviceArray<float> dshared_probs = upload(std::span<const float>(b.dshared_probs));
    const DeviceGrad dshared_w1(b.dshared_w1);
    const DeviceGrad dshared_w2(b.dshared_w2);
    BackwardArgs args;
    args.x = x_.span();
    args.dy = dy_.span();
    args.w1 = w1_.span();
    args.w2 = w2_.span();
    args.dx = dx.span();
    args.dprobs = dprobs.span();
    args.dw1 = dw1.device();
    args.dw2 = dw2.device();
    args.b1 = b1_.span();
    args.b2 = b2_.span();
    args.db1 = db1.device();
    args.db2 = db2.device();
    args.shared_w1 = shared_w1_.span();
    args.shared_w2 = shared_w2_.span();
    args.dshared_probs = dshared_probs.span();
    args.dshared_w1 = dshared_w1.device();
    args.dshared_w2 = dshared_w2.device();
    gatherer_.meet();
    times.backward = run_backward(layer_, saved, args, options_);
    download(b.dx, dx);
    download(b.dprobs, dprobs);
    dw1.download_to(b.dw1);
    dw2.download_to(b.dw2);
    db1.download_to(b.db1);
    db2.download_to(b.db2);
    download(b.dshared_probs, dshared_probs);
    dshared_w1.download_to(b.dshared_w1);
    dshared_w2.download_to(b.dshared_w2);
  }

  void note_routing(const RoutingPlan& plan) {
    // Without shared experts, which every token goes to.
    const int routed = plan.problem().num_experts / plan.num_ranks();
    const auto rows = plan.tokens_per_expert().first(static_cast<std::size_t>(routed));
    rows_per_expert_.assign(rows.begin(), rows.end());
    traffic_ = plan.traffic();
  }

  const workload::Split& split_;
  const StepOptions& options_;
  Gatherer& gatherer_;
  const int rank_;
  const std::optional<RowPool> pool_;
  Layer layer_;
  const bool backward_;
  DeviceArray<std::int32_t> ids_;
  DeviceArray<bf16> x_, w1_, w2_, b1_, b2_, dy_, shared_w1_, shared_w2_;
  DeviceArray<float> probs_, shared_probs_;
  std::vector<std::int64_t> rows_per_expert_;
  Traffic traffic_;
  std::vector<TimelineEvent> timeline_;
};

/// [step][rank] of one direction, from each rank's steps.
PassRecord pass_record(Pass pass, const std::vector<std::vector<PassStats>>& by_rank) {
  PassRecord record{pass, {}, {}};
  for (std::size_t step = 0; step < by_rank[0].size(); ++step) {
    double slowest = 0;
    record.stats.emplace_back();
    for (const auto& steps : by_rank) {
      slowest = std::max(slowest, steps[step].elapsed_s);
      record.stats.back().push_back(steps[step]);
    }
    record.seconds.push_back(slowest);
  }
  return record;
}

bool same_bits(const LayerResult& a, const LayerResult& b) {
  const auto same = [](const auto& x, const auto& y) {
    return x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0;
  };
  return same(a.out, b.out) && same(a.dx, b.dx) && same(a.dprobs, b.dprobs) && same(a.dw1, b.dw1) &&
         same(a.dw2, b.dw2) && same(a.main_dw1, b.main_dw1) && same(a.main_dw2, b.main_dw2) &&
         same(a.db1, b.db1) && same(a.db2, b.db2) && same(a.main_db1, b.main_db1) &&
         same(a.main_db2, b.main_db2) && same(a.dshared_probs, b.dshared_probs) &&
         same(a.dshared_w1, b.dshared_w1) && same(a.dshared_w2, b.dshared_w2) &&
         same(a.main_dshared_w1, b.main_dshared_w1) && same(a.main_dshared_w2, b.main_dshared_w2);
}

}  // namespace

StepReport run_cuda_steps(const LayerData& layer, const StepOptions& options,
                          const Communicator& member) {
  const workload::Split split(layer, member.size());
  const bool backward = options.passes != PassChoice::kForward;
  const workload::ResultTensors tensors{
      .backward = backward, .main_grad = options.main_grad, .ranks = member.size()};
  StepReport report;
  report.result = make_result(layer, tensors);
  Gatherer gatherer(dynamic_cast<cuda::CudaCommunicator&>(*member.impl()).bootstrap());
  CudaRank rank(split, options, member, gatherer, report.result);
  std::vector<double> plan_s;
  std::vector<PassStats> forward_stats, backward_stats;
  int different = 0;
  std::optional<Progress> progress;
  if (member.rank() == 0) {
    progress.emplace(cat("running ", member.size(), " processes"), options.repeat + 1);
  }
  for (int i = 0; i <= options.repeat && !report.interrupted; ++i) {
    LayerResult again = i == 0 ? LayerResult{} : make_result(layer, tensors);
    const CudaRank::Times times = rank.step(i == 0 ? report.result : again);
    report.interrupted = gatherer.gather_one(Interrupt::requested() ? 1 : 0)[0] != 0;
    if (progress) progress->advance();
    if (i == 0) continue;
    // Parts of other ranks are NaNs in both.
    if (different == 0 && !same_bits(report.result, again)) different = i;
    plan_s.push_back(times.plan_s);
    forward_stats.push_back(times.forward);
    backward_stats.push_back(times.backward);
  }

  progress.reset();
  report.steps = static_cast<int>(plan_s.size());

  const auto failed = gatherer.gather(std::span<const int>(&different, 1));
  for (std::size_t r = 0; r < failed.size(); ++r) {
    require(failed[r][0] == 0, ErrorCode::kInternal, "step ", failed[r][0],
            " gave other bits than the first one on rank ", r);
  }
  complete_result(gatherer, split, member.rank(), backward, report.result);
  const auto all_forward = gatherer.gather(std::span<const PassStats>(forward_stats));
  const auto all_backward = gatherer.gather(std::span<const PassStats>(backward_stats));
  if (report.steps > 0 && measures(options.passes, Pass::kForward)) {
    report.passes.push_back(pass_record(Pass::kForward, all_forward));
  }
  if (report.steps > 0 && measures(options.passes, Pass::kBackward)) {
    report.passes.push_back(pass_record(Pass::kBackward, all_backward));
  }
  for (const auto& part : gatherer.gather(std::span<const double>(plan_s))) {
    report.plan_seconds.resize(part.size());
    for (std::size_t i = 0; i < part.size(); ++i) {
      report.plan_seconds[i] = std::max(report.plan_seconds[i], part[i]);
    }
  }
  for (const auto& part : gatherer.gather(std::span<const std::int64_t>(rank.rows_per_expert()))) {
    report.rows_per_expert.insert(report.rows_per_expert.end(), part.begin(), part.end());
  }
  const Traffic traffic = rank.traffic();
  for (const auto& part : gatherer.gather(std::span<const Traffic>(&traffic, 1))) {
    report.traffic.push_back(part[0]);
  }
  report.pool = fullest(gatherer.gather_one(rank.pool()));
  report.timeline = gatherer.gather(std::span<const TimelineEvent>(rank.last_timeline()));
  return report;
}

}  // namespace uniep::tool
