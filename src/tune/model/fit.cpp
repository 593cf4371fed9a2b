#include "tune/model/fit.h"

#include <algorithm>
#include <cmath>

namespace uniep::tune {
namespace {

/// Least squares, scaled so that every column has length 1: sizes differ by many powers of ten.
struct NormalEquations {
  std::vector<double> scale;
  std::vector<std::vector<double>> a;
  std::vector<double> b;

  explicit NormalEquations(const std::vector<Observation>& observations) {
    const std::size_t n = observations.empty() ? 0 : observations[0].sizes.size();
    scale.assign(n, 0);
    for (const Observation& o : observations) {
      for (std::size_t i = 0; i < n; ++i) scale[i] += square(o.sizes[i] / o.seconds);
    }
    for (double& s : scale) s = s > 0 ? 1 / std::sqrt(s) : 0;
    a.assign(n, std::vector<double>(n, 0));
    b.assign(n, 0);
    for (const Observation& o : observations) {
      for (std::size_t i = 0; i < n; ++i) {
        const double x = o.sizes[i] / o.seconds * scale[i];
        b[i] += x;
        for (std::size_t j = 0; j < n; ++j) a[i][j] += x * o.sizes[j] / o.seconds * scale[j];
      }
    }
  }
  static double square(double v) { return v * v; }
};

}  // namespace

std::vector<double> fit_costs(const std::vector<Observation>& observations) {
  const NormalEquations e(observations);
  const std::size_t n = e.b.size();
  std::vector<double> x(n, 0);
  // One coordinate after another, each kept from falling below 0, converges: the problem is convex.
  constexpr int kRounds = 200000;
  constexpr double kDone = 1e-12;
  for (int round = 0; round < kRounds; ++round) {
    double moved = 0;
    for (std::size_t i = 0; i < n; ++i) {
      if (e.a[i][i] == 0) continue;
      double rest = e.b[i];
      for (std::size_t j = 0; j < n; ++j) rest -= j == i ? 0 : e.a[i][j] * x[j];
      const double next = std::max(0.0, rest / e.a[i][i]);
      moved = std::max(moved, std::abs(next - x[i]));
      x[i] = next;
    }
    if (moved < kDone) break;
  }
  for (std::size_t i = 0; i < n; ++i) x[i] *= e.scale[i];
  return x;
}

}  // namespace uniep::tune
