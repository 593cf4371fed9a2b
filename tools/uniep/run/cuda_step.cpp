#include "run/cuda_step.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>

#include "base/check.h"
#include "common/interrupt.h"
#include "common/progress.h"
#include "cuda/device_array.h"
#include "group/cuda/cuda_communicator.h"
#include "group/gatherer.h"
#include "run/step_log.h"
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
           Gatherer& gatherer, LayerResult& result, RankLog& log)
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
        ids_(upload(split.topk_ids(rank_))),
        log_(log) {
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

  /// Poisons the outputs, runs a step and brings its results to `result`; `measured` is false for
  /// the warm-up.
  void step(LayerResult& result, bool measured) {
    const ForwardArgs f = split_.forward_args(rank_, result);
    const DeviceArray<bf16> out = upload(std::span<const bf16>(f.out));
    // So that no pass is charged with the time that another rank took to prepare it.
    gatherer_.meet();
    const auto start = Clock::now();
    const RoutingPlan plan = layer_.plan(ids_.span());
    layer_.synchronize();
    const double plan_s = std::chrono::duration<double>(Clock::now() - start).count();
    if (measured) log_.plan_seconds.push_back(plan_s);
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
    if (measured) note(log_.forward, layer_.last_pass());
    download(f.out, out);
    if (!measures(options_.passes, Pass::kForward)) (void)layer_.take_timeline();
    if (backward_) step_backward(saved, result, measured);
    log_.note_routing(plan);
    log_.timeline = layer_.take_timeline();
    log_.pool = pool_use(pool_);
  }

 private:
  /// The time of a pass is that of its launches.
  static void note(PassLog& log, const PassStats& stats) {
    log.seconds.push_back(stats.elapsed_s);
    log.stats.push_back(stats);
  }

  void step_backward(Saved& saved, LayerResult& result, bool measured) {
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
    const PassStats stats = run_backward(layer_, saved, args, options_);
    if (measured) note(log_.backward, stats);
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
  RankLog& log_;
};

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
  RankLog log;
  CudaRank rank(split, options, member, gatherer, report.result, log);
  std::optional<Progress> progress;
  if (member.rank() == 0) {
    progress.emplace(cat("running ", member.size(), " processes"), options.repeat + 1);
  }
  for (int i = 0; i <= options.repeat && !log.interrupted; ++i) {
    LayerResult again = i == 0 ? LayerResult{} : make_result(layer, tensors);
    rank.step(i == 0 ? report.result : again, i > 0);
    if (i > 0 && log.mismatch.empty()) {
      log.mismatch = difference(split, member.rank(), options.passes, report.result, again, i);
    }
    log.interrupted = gatherer.gather_one(Interrupt::requested() ? 1 : 0)[0] != 0;
    if (progress) progress->advance();
  }
  progress.reset();
  combine_logs(gather_logs(gatherer, log), options, report);
  complete_result(gatherer, split, member.rank(), backward, report.result);
  return report;
}

}  // namespace uniep::tool
