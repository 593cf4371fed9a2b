#include "bench_rank.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "bench_sample.h"
#include "check.h"
#include "gatherer.h"
#include "uniep/layer.h"

namespace uniep::tool {
namespace {

/// The results of a step on one rank.
struct Results {
  BenchTensor<bf16> out, dx, dw1, dw2;
  BenchTensor<float> dprobs;

  Results(const BenchCase& bench, bool backward, BenchDevice& device) {
    const workload::ShapeSpec& s = bench.spec;
    const std::int64_t weights = bench.local_experts() * s.hidden * s.intermediate;
    out = BenchTensor<bf16>(device, s.tokens * s.hidden);
    if (!backward) return;
    dx = BenchTensor<bf16>(device, s.tokens * s.hidden);
    dprobs = BenchTensor<float>(device, s.tokens * s.topk);
    dw1 = BenchTensor<bf16>(device, 2 * weights);
    dw2 = BenchTensor<bf16>(device, weights);
  }

  std::span<std::byte> bytes(ResultTensor tensor) const {
    switch (tensor) {
      case ResultTensor::kOut:
        return out.bytes();
      case ResultTensor::kDx:
        return dx.bytes();
      case ResultTensor::kDprobs:
        return dprobs.bytes();
      case ResultTensor::kDw1:
        return dw1.bytes();
      default:
        return dw2.bytes();
    }
  }
};

int width_of(ResultTensor tensor) {
  return tensor == ResultTensor::kDprobs ? sizeof(float) : sizeof(bf16);
}

std::vector<ResultTensor> tensors_of(Pass pass) {
  using enum ResultTensor;
  return pass == Pass::kForward ? std::vector{kOut} : std::vector{kDx, kDprobs, kDw1, kDw2};
}

class RankBench {
 public:
  RankBench(const BenchCase& bench, const BenchOptions& options, const Communicator& member,
            BenchDevice& device);

  BenchReport run();

 private:
  void make_inputs();
  void measure_floors(BenchReport& report);
  std::vector<BenchPass> measure(const Schedule& schedule);
  void keep_baseline(const Schedule& schedule);
  void forward(const Schedule& schedule, const Results& results);
  void backward(const Schedule& schedule, const Results& results);
  template <class Call>
  BenchPass repeat(Pass pass, const Call& call);
  void poison(Pass pass, const Results& results);
  Wrong differences(Pass pass);
  Wrong inexact(Pass pass);
  std::vector<double> downloaded(const Sample& sample);

  const BenchCase& bench_;
  const BenchOptions& options_;
  BenchDevice& device_;
  const int rank_;
  const bool backward_;
  Gatherer gatherer_;
  Layer layer_;
  BenchTensor<bf16> x_, dy_, w1_, w2_;
  BenchTensor<float> probs_;
  BenchTensor<std::int32_t> ids_;
  std::optional<RoutingPlan> plan_;
  Saved saved_;
  Results results_;
  std::optional<Results> baseline_;  // of ...
  std::optional<Schedule> baseline_schedule_;
  std::vector<Sample> samples_;
};

RankBench::RankBench(const BenchCase& bench, const BenchOptions& options,
                     const Communicator& member, BenchDevice& device)
    : bench_(bench),
      options_(options),
      device_(device),
      rank_(member.rank()),
      backward_(options.passes != PassChoice::kForward),
      gatherer_(device.bootstrap(member)),
      layer_(bench.problem, member),
      results_(bench, backward_, device) {
  make_inputs();
  plan_ = layer_.plan(ids_.span());
  if (!options.check) return;
  baseline_.emplace(bench, backward_, device);
  samples_ = exact_samples(bench, rank_, backward_);
}

void RankBench::make_inputs() {
  using workload::Tensor;
  const workload::ShapeSpec& s = bench_.spec;
  const std::int64_t weights = bench_.local_experts() * s.hidden * s.intermediate;
  // A rank's part of every tensor in global order is its rank-th of equal parts.
  const auto made = [&](Tensor tensor, std::int64_t count) {
    BenchTensor<bf16> part(device_, count);
    device_.fill(part.span(), workload::numbers_of(tensor, s, bench_.seed),
                 static_cast<std::uint64_t>(rank_ * count));
    return part;
  };
  x_ = made(Tensor::kX, s.tokens * s.hidden);
  w1_ = made(Tensor::kW1, 2 * weights);
  w2_ = made(Tensor::kW2, weights);
  if (backward_) dy_ = made(Tensor::kDy, s.tokens * s.hidden);

  const std::int64_t slots = s.tokens * s.topk;
  ids_ = BenchTensor<std::int32_t>(device_, slots);
  probs_ = BenchTensor<float>(device_, slots);
  device_.upload(ids_.bytes(), bench_.routing.topk_ids.data() + rank_ * slots);
  device_.upload(probs_.bytes(), bench_.routing.topk_probs.data() + rank_ * slots);
}

void RankBench::forward(const Schedule& schedule, const Results& results) {
  saved_ = layer_.forward(*plan_,
                          {.x = x_.span(),
                           .topk_probs = probs_.span(),
                           .w1 = w1_.span(),
                           .w2 = w2_.span(),
                           .out = results.out.span()},
                          schedule);
}

void RankBench::backward(const Schedule& schedule, const Results& results) {
  layer_.backward(saved_,
                  {dy_.span(), w1_.span(), w2_.span(), results.dx.span(), results.dprobs.span(),
                   results.dw1.span(), results.dw2.span()},
                  schedule);
}

BenchReport RankBench::run() {
  BenchReport report;
  measure_floors(report);
  for (const Schedule& schedule : options_.schedules) {
    report.schedules.push_back(measure(schedule));
  }
  return report;
}

void RankBench::measure_floors(BenchReport& report) {
  const auto gemms = device_.gemm_seconds(bench_, rank_, options_, w1_.span(), w2_.span());
  // The exchange is everybody's, but one rank without cuBLAS is enough for there to be no floor.
  const auto all = gatherer_.gather_one(gemms.value_or(GemmSeconds{}));
  const auto measured = gatherer_.gather_one(gemms ? 1 : 0);
  if (std::ranges::find(measured, 0) != measured.end()) return;
  report.floors = {.gemms = all, .wire = wire_rows(bench_), .hidden = bench_.spec.hidden};
}

std::vector<BenchPass> RankBench::measure(const Schedule& schedule) {
  if (options_.check) keep_baseline(schedule);
  std::vector<BenchPass> measured;
  if (measures(options_.passes, Pass::kForward)) {
    measured.push_back(repeat(Pass::kForward, [&] { forward(schedule, results_); }));
  } else {
    forward(schedule, results_);
  }
  if (backward_) measured.push_back(repeat(Pass::kBackward, [&] { backward(schedule, results_); }));
  return measured;
}

void RankBench::keep_baseline(const Schedule& schedule) {
  const Schedule sequential = sequential_like(schedule);
  if (baseline_schedule_ == sequential) return;
  baseline_schedule_ = sequential;
  forward(sequential, *baseline_);
  if (backward_) backward(sequential, *baseline_);
  layer_.synchronize();
}

template <class Call>
BenchPass RankBench::repeat(Pass pass, const Call& call) {
  std::vector<PassStats> stats;
  Wrong worst;
  for (int i = 0; i < options_.warmup + options_.iterations; ++i) {
    poison(pass, results_);
    // On a GPU the pass that is measured follows another one that is not. Every pass ends with
    // waiting for all ranks, so the first takes up what the ranks' hosts are apart, and the second
    // is in the stream before it begins: it is timed as within a step of training, without start
    // skew and without the host. A barrier of the hosts would leave them tens of microseconds
    // apart, which early ranks would be charged for. On the CPU calls begin together of themselves.
    if (device_.runs_ahead()) call();
    call();
    layer_.synchronize();
    if (i < options_.warmup) continue;
    stats.push_back(layer_.last_pass());
    if (!options_.check) continue;
    const Wrong wrong = differences(pass);
    if (wrong.total() >= worst.total()) worst = wrong;
  }
  if (options_.check) worst += inexact(pass);

  BenchPass measured{.pass = pass, .stats = gatherer_.gather(std::span<const PassStats>(stats))};
  Wrong all;
  for (const Wrong& of_rank : gatherer_.gather_one(worst)) all += of_rank;
  if (options_.check) measured.wrong = all;
  return measured;
}

/// What a pass forgets to write shows.
void RankBench::poison(Pass pass, const Results& results) {
  for (const ResultTensor tensor : tensors_of(pass)) device_.poison(results.bytes(tensor));
}

Wrong RankBench::differences(Pass pass) {
  Wrong wrong;
  for (const ResultTensor tensor : tensors_of(pass)) {
    const auto got = results_.bytes(tensor);
    const int width = width_of(tensor);
    wrong.compared += static_cast<std::int64_t>(got.size()) / width;
    wrong.differing += device_.count_differing(got, baseline_->bytes(tensor), width);
  }
  return wrong;
}

Wrong RankBench::inexact(Pass pass) {
  Wrong wrong;
  const std::vector<ResultTensor> of_pass = tensors_of(pass);
  for (const Sample& sample : samples_) {
    if (std::ranges::find(of_pass, sample.tensor) == of_pass.end()) continue;
    wrong.sampled += static_cast<std::int64_t>(sample.exact.size());
    wrong.inexact += count_inexact(downloaded(sample), sample.exact);
  }
  return wrong;
}

std::vector<double> RankBench::downloaded(const Sample& sample) {
  const auto width = static_cast<std::size_t>(width_of(sample.tensor));
  const std::span<const std::byte> tensor = results_.bytes(sample.tensor);
  std::vector<double> values;
  for (const Sample::Run& run : sample.runs) {
    const auto count = static_cast<std::size_t>(run.count);
    std::vector<std::byte> bytes(count * width);
    device_.download(bytes.data(),
                     tensor.subspan(static_cast<std::size_t>(run.first) * width, bytes.size()));
    for (std::size_t i = 0; i < count; ++i) {
      float wide = 0;
      bf16 narrow;
      if (width == sizeof wide) {
        std::memcpy(&wide, &bytes[i * width], sizeof wide);
      } else {
        std::memcpy(&narrow, &bytes[i * width], sizeof narrow);
        wide = to_float(narrow);
      }
      values.push_back(wide);
    }
  }
  return values;
}

}  // namespace

BenchReport run_bench(const BenchCase& bench, const BenchOptions& options,
                      const Communicator& member, BenchDevice& device) {
  return RankBench(bench, options, member, device).run();
}

}  // namespace uniep::tool
