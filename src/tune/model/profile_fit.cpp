#include "tune/model/profile_fit.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "base/check.h"

namespace uniep::tune {
namespace {

double predicted(const std::vector<double>& costs, const Observation& o) {
  double seconds = 0;
  for (std::size_t i = 0; i < costs.size(); ++i) seconds += costs[i] * o.sizes[i];
  return seconds;
}

std::vector<double> errors(const std::vector<double>& costs,
                           const std::vector<Observation>& observations) {
  std::vector<double> of_each;
  for (const Observation& o : observations) {
    of_each.push_back(std::abs(predicted(costs, o) / o.seconds - 1));
  }
  return of_each;
}

double squares(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v * v;
  return sum;
}

/// "2e-06 + 3.9e-13 mnk": the terms that are not 0.
std::string formula(const std::vector<double>& costs, const std::vector<std::string>& names) {
  std::ostringstream text;
  text.precision(3);
  for (std::size_t i = 0; i < costs.size(); ++i) {
    if (costs[i] == 0) continue;
    text << (text.tellp() > 0 ? " + " : "") << costs[i];
    if (!names[i].empty()) text << ' ' << names[i];
  }
  return text.tellp() > 0 ? text.str() : "0";
}

FitReport report_of(const std::string& what, const std::vector<double>& costs,
                    const std::vector<Observation>& observations,
                    const std::vector<std::string>& names) {
  FitReport report;
  report.what = what;
  report.samples = observations.size();
  report.result = formula(costs, names);
  for (const double error : errors(costs, observations)) {
    report.mean_error += error / static_cast<double>(observations.size());
    report.worst_error = std::max(report.worst_error, error);
  }
  return report;
}

std::vector<double> fit(const std::string& what, const std::vector<Observation>& observations,
                        const std::vector<std::string>& names, std::vector<FitReport>& reports) {
  require(!observations.empty(), ErrorCode::kInternal, "nothing was measured of ", what,
          "; at least one task of it is needed");
  const std::vector<double> costs = fit_costs(observations);
  reports.push_back(report_of(what, costs, observations, names));
  return costs;
}

/// Tiles of one size of tile differ in k, and in m and n as far as they are partial.
std::vector<ProductObservations> tile_observations(const std::vector<TileSample>& tiles,
                                                   double padding, int k_step) {
  std::map<std::pair<Stage, int>, ProductObservations> by_stage;
  for (const TileSample& t : tiles) {
    ProductObservations& of_stage = by_stage[{t.stage, t.tile_n}];
    of_stage.stage = t.stage;
    of_stage.tile_n = t.tile_n;
    const auto padded = [&](std::int64_t real, int whole) {
      return static_cast<double>(real) + padding * static_cast<double>(whole - real);
    };
    const auto k = static_cast<double>(round_up<std::int64_t>(t.size.k, k_step));
    const double mn = padded(t.size.m, t.tile_m) * padded(t.size.n, t.tile_n);
    of_stage.observations.push_back({{0, mn * k, 0, 0, mn}, t.seconds});
  }
  std::vector<ProductObservations> all;
  for (auto& [key, of_stage] : by_stage) all.push_back(std::move(of_stage));
  return all;
}

double residual(const std::vector<ProductObservations>& products) {
  double sum = 0;
  for (const ProductObservations& p : products) {
    sum += squares(errors(fit_costs(p.observations), p.observations));
  }
  return sum;
}

}  // namespace

std::vector<double> product_terms(double m, double n, double k) {
  return {1, m * n * k, m * k, n * k, m * n};
}

std::vector<double> move_terms(const MoveSize& size) {
  return {1, static_cast<double>(size.items), static_cast<double>(size.bytes)};
}

std::vector<GemmCost> fit_products(const std::vector<ProductObservations>& products,
                                   std::vector<FitReport>& reports) {
  std::vector<GemmCost> costs;
  for (const ProductObservations& p : products) {
    const std::string what =
        p.tile_n == 0 ? name(p.stage) : cat(name(p.stage), ", tile_n=", p.tile_n);
    const auto c = fit(what, p.observations, {"", "mnk", "mk", "nk", "mn"}, reports);
    costs.push_back({p.stage, p.tile_n, c[0], c[1], c[2], c[3], c[4]});
  }
  return costs;
}

MoveCost fit_moves(const std::string& what, const std::vector<Observation>& observations,
                   std::vector<FitReport>& reports) {
  const auto c = fit(what, observations, {"", "an item", "a byte"}, reports);
  return {.fixed = c[0], .per_item = c[1], .per_byte = c[2]};
}

TileCosts fit_tiles(const std::vector<TileSample>& tiles, int k_step,
                    std::vector<FitReport>& reports) {
  constexpr int kSteps = 20;
  TileCosts costs;
  costs.padding = 1;  // where no tile is partial it does not matter
  double least = residual(tile_observations(tiles, costs.padding, k_step));
  for (int i = kSteps - 1; i >= 0; --i) {
    const double padding = static_cast<double>(i) / kSteps;
    const double here = residual(tile_observations(tiles, padding, k_step));
    if (here >= least) continue;
    least = here;
    costs.padding = padding;
  }
  costs.gemms = fit_products(tile_observations(tiles, costs.padding, k_step), reports);
  return costs;
}

double fit_byte(const std::string& what, const std::vector<Transfer>& transfers,
                std::vector<FitReport>& reports) {
  double ones = 0, bytes = 0, squared = 0, seconds = 0, products = 0;
  for (const Transfer& t : transfers) {
    const double weight = 1 / (t.seconds * t.seconds);  // errors are relative
    ones += weight;
    bytes += weight * t.bytes;
    squared += weight * t.bytes * t.bytes;
    seconds += weight * t.seconds;
    products += weight * t.bytes * t.seconds;
  }
  const double spread = ones * squared - bytes * bytes;
  const double slope = spread > 0 ? std::max(0.0, (ones * products - bytes * seconds) / spread) : 0;
  const double begin = (seconds - slope * bytes) / ones;
  std::vector<Observation> observations;
  for (const Transfer& t : transfers) observations.push_back({{1, t.bytes}, t.seconds});
  reports.push_back(report_of(what, {begin, slope}, observations, {"", "a byte"}));
  return slope;
}

}  // namespace uniep::tune
