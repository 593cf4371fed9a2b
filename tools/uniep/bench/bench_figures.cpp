#include "bench/bench_figures.h"

#include <algorithm>
#include <numeric>

#include "base/quantile.h"
#include "graph/extents.h"
#include "graph/layer_graph.h"

namespace uniep::tool {
namespace {

bool pushes(Stage stage) {
  const StageRow* row = kLayerGraph.find(stage);
  return row != nullptr && row->side == StageSide::kPush;
}

/// The innermost size of a tensor.
Extent innermost(const TensorRow& tensor) {
  Extent last = Extent::kOne;
  for (const Extent e : tensor.shape) {
    if (e != Extent::kOne) last = e;
  }
  return last;
}

Product product_of(const StageRow& row, const Extents& extents) {
  const std::int64_t cols = row.halves * extents[row.cols];
  const std::int64_t reduction = extents[row.reduction];
  if (row.grid == TileGrid::kWeightTiles) {
    return {row.stage, ProductLayout::kTN, extents[row.rows], cols, reduction};
  }
  const bool along_reduction = innermost(kLayerGraph[row.reads[1]]) == row.reduction;
  return {row.stage, along_reduction ? ProductLayout::kNT : ProductLayout::kNN,
          extents[Extent::kRows], cols, reduction};
}

/// The choice of a pass that computes again all that it may.
constexpr GraphChoice kAllComputed{.drops_x_rows = true, .drops_h = true};

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

/// The bytes over the wire that one stage moves: if several stages of a pass pull, or push, each
/// moves as many.
double bytes_of(const BenchPass& measured, Stage stage) {
  const auto share = [&](bool (*moves)(Stage), double of_all) {
    if (!moves(stage)) return 0.0;
    int sharing = 0;
    for (int i = 0; i < kNumStages; ++i) {
      const auto other = static_cast<Stage>(i);
      if (moves(other) && ran(measured, other)) ++sharing;
    }
    return of_all / std::max(1, sharing);
  };
  return share(pulls, mean_bytes(measured, true, false)) +
         share(pushes, mean_bytes(measured, false, true));
}

}  // namespace

std::vector<Product> products(const workload::ShapeSpec& spec, Pass pass, std::int64_t rows,
                              GraphChoice choice) {
  Extents extents = extents_of_widths(spec.topk, 0, spec.hidden, spec.intermediate,
                                      is_gated(spec.activation) ? 2 : 1, spec.bias);
  extents[Extent::kRows] = rows;
  std::vector<Product> all;
  kLayerGraph.for_each_stage(pass, [&](const StageRow& row) {
    const bool computed = row.kind == StageKind::kProduct && holds(row.when, choice);
    if (computed) all.push_back(product_of(row, extents));
  });
  return all;
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
  return static_cast<double>(most * hidden * bytes_of(kLayerGraph[Tensor::kTokens].element)) /
         kLinkBytesPerSecond;
}

std::optional<double> Floors::of(Stage stage) const {
  return if_positive(std::max(gemms_s(std::span(&stage, 1)), wire_s(pulls(stage), pushes(stage))));
}

std::optional<double> Floors::of(Pass pass) const {
  std::vector<Stage> stages;
  for (const Product& p : products({}, pass, 0, kAllComputed)) stages.push_back(p.stage);
  return if_positive(std::max(gemms_s(stages), wire_s(true, true)));
}

Wrong& Wrong::operator+=(const Wrong& other) {
  compared += other.compared;
  differing += other.differing;
  sampled += other.sampled;
  inexact += other.inexact;
  not_finite += other.not_finite;
  return *this;
}

std::vector<double> pass_seconds(const BenchPass& measured) {
  return slowest_rank(measured, [](const PassStats& s) { return s.elapsed_s; });
}

std::vector<BenchRow> bench_rows(const BenchPass& measured, const workload::ShapeSpec& spec,
                                 std::int64_t rows, const std::optional<Floors>& floors) {
  const auto ranks = static_cast<double>(std::max<std::size_t>(1, measured.stats.size()));
  const std::vector<Product> all = products(spec, measured.pass, rows, kAllComputed);
  const auto add_rates = [&](BenchRow row, double flops, double bytes) {
    const double seconds = median(row.seconds);
    row.tflops = rate(flops / ranks, seconds, 1e12);
    row.gbps = rate(bytes, seconds, 1e9);
    return row;
  };

  // The whole pass counts only what has to be computed: not what is computed again.
  double flops = 0;
  for (const Product& p : products(spec, measured.pass, rows)) flops += p.flops();
  BenchRow whole{.pass = measured.pass, .seconds = pass_seconds(measured)};
  if (floors) whole.floor_s = floors->of(measured.pass);
  if (measured.wrong) whole.wrong = measured.wrong->total();
  std::vector<BenchRow> table = {
      add_rates(std::move(whole), flops, mean_bytes(measured, true, true))};

  for (int i = 0; i < kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    if (!ran(measured, stage)) continue;
    BenchRow row{.pass = measured.pass,
                 .stage = stage,
                 .seconds = slowest_rank(measured, [&](const auto& s) { return s[stage].busy_s; })};
    if (floors) row.floor_s = floors->of(stage);
    const auto product = std::ranges::find(all, stage, &Product::stage);
    const double own = product == all.end() ? 0 : product->flops();
    table.push_back(add_rates(std::move(row), own, bytes_of(measured, stage)));
  }
  return table;
}

}  // namespace uniep::tool
