#include "bench/bench_rank.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "bench/bench_layer.h"
#include "bench/bench_sample.h"
#include "common/interrupt.h"
#include "group/communicator_impl.h"
#include "group/gatherer.h"
#include "run/result_check.h"

namespace uniep::tool {
namespace {

class RankBench {
 public:
  RankBench(const BenchCase& bench, const BenchOptions& options, const Communicator& member,
            BenchDevice& device);

  BenchReport run();

 private:
  void measure_floors(BenchReport& report);
  tune::LayerSchedules resolve(const std::optional<Schedule>& schedule);
  std::vector<BenchPass> measure(const tune::LayerSchedules& schedules);
  void measure(Pass pass, const Schedule& schedule, std::vector<BenchPass>& measured);
  BenchPass repeat(Pass pass, const Schedule& schedule);
  bool is_interrupted();
  Wrong differences(Pass pass);
  Wrong inexact(Pass pass);
  std::vector<double> downloaded(const Sample& sample);

  const BenchCase& bench_;
  const BenchOptions& options_;
  BenchDevice& device_;
  const Communicator member_;
  const int rank_;
  const bool backward_;
  Gatherer gatherer_;
  BenchLayer layer_;
  std::vector<Sample> samples_;
  bool interrupted_ = false;
};

RankBench::RankBench(const BenchCase& bench, const BenchOptions& options,
                     const Communicator& member, BenchDevice& device)
    : bench_(bench),
      options_(options),
      device_(device),
      member_(member),
      rank_(member.rank()),
      backward_(options.passes != PassChoice::kForward),
      gatherer_(device.bootstrap(member)),
      layer_(bench, backward_, member, device) {
  if (options.check) samples_ = exact_samples(bench, member.rank(), backward_);
}

BenchReport RankBench::run() {
  BenchReport report;
  measure_floors(report);
  for (const BenchSchedule& wanted : options_.schedules) {
    if (interrupted_) break;
    report.used.push_back(resolve(wanted.schedule));
    report.schedules.push_back(measure(report.used.back()));
  }
  report.interrupted = interrupted_;
  return report;
}

/// A signal need not have reached all ranks: rank 0 decides.
bool RankBench::is_interrupted() {
  if (!interrupted_) interrupted_ = gatherer_.gather_one(Interrupt::requested() ? 1 : 0)[0] != 0;
  return interrupted_;
}

tune::LayerSchedules RankBench::resolve(const std::optional<Schedule>& schedule) {
  if (schedule) {
    const tune::ScheduleChoice given{*schedule, tune::ChoiceOrigin::kGiven};
    return {given, given};
  }
  return tune::agree_on_schedules(
      gatherer_.bootstrap(), rank_, env_timeout_ms(), tune::kLongestChoiceMs, "uniep bench", [&] {
        return tune::look_up_schedules(member_.backend(), bench_.problem, member_.layout(),
                                       bench_.skew);
      });
}

void RankBench::measure_floors(BenchReport& report) {
  if (!options_.floors) return;
  const auto gemms = device_.gemm_seconds(bench_, rank_, options_, layer_.w1(), layer_.w2());
  // The exchange is everybody's, but one rank without cuBLAS is enough for there to be no floor.
  const auto all = gatherer_.gather_one(gemms.value_or(GemmSeconds{}));
  const auto measured = gatherer_.gather_one(gemms ? 1 : 0);
  if (std::ranges::find(measured, 0) != measured.end()) return;
  report.floors = {.gemms = all, .wire = wire_rows(bench_), .hidden = bench_.spec.hidden};
}

std::vector<BenchPass> RankBench::measure(const tune::LayerSchedules& schedules) {
  const Schedule& forward = schedules.forward.schedule;
  if (options_.check) layer_.keep_baseline(sequential_like(forward));
  std::vector<BenchPass> measured;
  if (measures(options_.passes, Pass::kForward)) {
    measure(Pass::kForward, forward, measured);
  } else {
    layer_.prepare_backward(forward);
  }
  if (backward_) measure(Pass::kBackward, schedules.backward.schedule, measured);
  return measured;
}

void RankBench::measure(Pass pass, const Schedule& schedule, std::vector<BenchPass>& measured) {
  if (interrupted_) return;
  BenchPass of_pass = repeat(pass, schedule);
  if (of_pass.passes() > 0) measured.push_back(std::move(of_pass));
}

BenchPass RankBench::repeat(Pass pass, const Schedule& schedule) {
  std::vector<PassStats> stats;
  Wrong worst;
  for (int i = 0; i < options_.passes_of_a_direction() && !is_interrupted(); ++i) {
    const PassStats of_pass = layer_.run(pass, schedule);
    if (rank_ == 0) options_.passed(pass);
    if (i < options_.warmup) continue;
    stats.push_back(of_pass);
    if (!options_.check) continue;
    const Wrong wrong = differences(pass);
    if (wrong.total() >= worst.total()) worst = wrong;
  }
  if (options_.check && !stats.empty()) worst += inexact(pass);

  BenchPass measured{.pass = pass, .stats = gatherer_.gather(std::span<const PassStats>(stats))};
  Wrong all;
  for (const Wrong& of_rank : gatherer_.gather_one(worst)) all += of_rank;
  if (options_.check) measured.wrong = all;
  return measured;
}

Wrong RankBench::differences(Pass pass) {
  Wrong wrong;
  wrong.compared = layer_.count_elements(pass);
  wrong.differing = layer_.count_differing(pass);
  return wrong;
}

Wrong RankBench::inexact(Pass pass) {
  Wrong wrong;
  const std::vector<ResultTensor> of_pass = tensors_of(pass, bench_.problem);
  for (const Sample& sample : samples_) {
    if (std::ranges::find(of_pass, sample.tensor) == of_pass.end()) continue;
    wrong.sampled += static_cast<std::int64_t>(sample.exact.size());
    const std::vector<double> got = downloaded(sample);
    wrong.inexact += count_inexact(got, sample);
    wrong.not_finite += std::ranges::count_if(got, [](double v) { return !std::isfinite(v); });
  }
  return wrong;
}

std::vector<double> RankBench::downloaded(const Sample& sample) {
  const auto width = static_cast<std::size_t>(width_of(sample.tensor));
  const std::span<const std::byte> tensor = layer_.results().bytes(sample.tensor);
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
