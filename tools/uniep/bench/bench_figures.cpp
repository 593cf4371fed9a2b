#include "bench/bench_figures.h"

#include <algorithm>
#include <numeric>

#include "base/quantile.h"

namespace uniep::tool {
namespace {

bool pulls(Stage stage) { return stage == Stage::kDispatch; }
bool pushes(Stage stage) { return stage == Stage::kFc2 || stage == Stage::kDfc1; }

std::optional<double> if_positive(double value) {
  return value > 0 ? std::optional(value) : std::nullopt;
}

/// Quantity per second in units of `unit`; nothing where there is neither.
std::optional<double> rate(double quantity, double seconds, double unit) {
  return seconds > 0 ? if_positive(quantity / seconds / unit) : std::nullopt;
}

/// `figure(stats)` of every pass, of the rank whose median is largest.
template <class Figure>
std::vector<double> slowest_rank(const BenchPass& measured, const Figure& figure) {
  std::vector<double> slowest;
  for (const std::vector<PassStats>& passes : measured.stats) {
    std::vector<double> seconds;
    for (const PassStats& stats : passes) seconds.push_back(figure(stats));
    if (slowest.empty() || median(seconds) > median(slowest)) slowest = std::move(seconds);
  }
  return slowest;
}

/// Bytes over the wire, the mean of the ranks.
double mean_bytes(const BenchPass& measured, bool pulled, bool pushed) {
  double bytes = 0;
  for (const std::vector<PassStats>& passes : measured.stats) {
    if (passes.empty()) continue;
    if (pulled) bytes += static_cast<double>(passes.back().pulled_bytes);
    if (pushed) bytes += static_cast<double>(passes.back().pushed_bytes);
  }
  return bytes / static_cast<double>(std::max<std::size_t>(1, measured.stats.size()));
}

bool ran(const BenchPass& measured, Stage stage) {
  return std::ranges::any_of(measured.stats, [&](const std::vector<PassStats>& passes) {
    return std::ranges::any_of(passes, [&](const PassStats& s) { return s[stage].tasks > 0; });
  });
}

}  // namespace

std::vector<Product> products(const workload::ShapeSpec& spec, Pass pass, std::int64_t rows) {
  const std::int64_t hidden = spec.hidden;
  const std::int64_t inter = spec.intermediate;
  if (pass == Pass::kForward) {
    return {{Stage::kFc1, ProductLayout::kNT, rows, 2 * inter, hidden},
            {Stage::kFc2, ProductLayout::kNT, rows, hidden, inter}};
  }
  return {{Stage::kDfc2, ProductLayout::kNN, rows, inter, hidden},
          {Stage::kDfc1, ProductLayout::kNN, rows, hidden, 2 * inter},
          {Stage::kWgrad2, ProductLayout::kTN, hidden, inter, rows},
          {Stage::kWgrad1, ProductLayout::kTN, 2 * inter, hidden, rows}};
}

double Floors::gemms_s(std::span<const Stage> stages) const {
  double most = 0;
  for (const GemmSeconds& of_rank : gemms) {
    double sum = 0;
    for (const Stage stage : stages) sum += of_rank[static_cast<std::size_t>(stage)];
    most = std::max(most, sum);
  }
  return most;
}

/// Links carry as much in as out at the same time.
double Floors::wire_s(bool pull, bool push) const {
  std::int64_t most = 0;
  for (const WireRows& w : wire) {
    const std::int64_t in = (pull ? w.pulled : 0) + (push ? w.returned : 0);
    const std::int64_t out = (pull ? w.served : 0) + (push ? w.pushed : 0);
    most = std::max({most, in, out});
  }
  return static_cast<double>(most * hidden) * sizeof(bf16) / kLinkBytesPerSecond;
}

std::optional<double> Floors::of(Stage stage) const {
  return if_positive(std::max(gemms_s(std::span(&stage, 1)), wire_s(pulls(stage), pushes(stage))));
}

std::optional<double> Floors::of(Pass pass) const {
  std::vector<Stage> stages;
  for (const Product& p : products({}, pass, 0)) stages.push_back(p.stage);
  return if_positive(std::max(gemms_s(stages), wire_s(true, true)));
}

Wrong& Wrong::operator+=(const Wrong& other) {
  compared += other.compared;
  differing += other.differing;
  sampled += other.sampled;
  inexact += other.inexact;
  return *this;
}

std::vector<double> pass_seconds(const BenchPass& measured) {
  return slowest_rank(measured, [](const PassStats& s) { return s.elapsed_s; });
}

std::vector<BenchRow> bench_rows(const BenchPass& measured, const workload::ShapeSpec& spec,
                                 std::int64_t rows, const std::optional<Floors>& floors) {
  const auto ranks = static_cast<double>(std::max<std::size_t>(1, measured.stats.size()));
  const std::vector<Product> all = products(spec, measured.pass, rows);
  const auto add_rates = [&](BenchRow row, double flops, bool pulled, bool pushed) {
    const double seconds = median(row.seconds);
    row.tflops = rate(flops / ranks, seconds, 1e12);
    row.gbps = rate(mean_bytes(measured, pulled, pushed), seconds, 1e9);
    return row;
  };

  double flops = 0;
  for (const Product& p : all) flops += p.flops();
  BenchRow whole{.pass = measured.pass, .seconds = pass_seconds(measured)};
  if (floors) whole.floor_s = floors->of(measured.pass);
  if (measured.wrong) whole.wrong = measured.wrong->total();
  std::vector<BenchRow> table = {add_rates(std::move(whole), flops, true, true)};

  for (int i = 0; i < kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    if (!ran(measured, stage)) continue;
    BenchRow row{.pass = measured.pass,
                 .stage = stage,
                 .seconds = slowest_rank(measured, [&](const auto& s) { return s[stage].busy_s; })};
    if (floors) row.floor_s = floors->of(stage);
    const auto product = std::ranges::find(all, stage, &Product::stage);
    const double own = product == all.end() ? 0 : product->flops();
    table.push_back(add_rates(std::move(row), own, pulls(stage), pushes(stage)));
  }
  return table;
}

}  // namespace uniep::tool
