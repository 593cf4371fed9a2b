#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "bench/bench_case.h"
#include "graph/graph.h"
#include "uniep/layer.h"

namespace uniep::tool {

/// How the operands of a product lie in memory, row-major: N as the product reads them, T
/// transposed.
enum class ProductLayout { kNT, kNN, kTN };

/// The GEMM of a stage for one expert: [m, n], summed over k.
struct Product {
  Stage stage;
  ProductLayout layout;
  std::int64_t m, n, k;

  double flops() const { return 2.0 * static_cast<double>(m * n * k); }
};

/// The products of a direction for an expert of `rows` rows, in the order of the pass; with those
/// that are computed again where forward keeps less.
std::vector<Product> products(const workload::ShapeSpec& spec, Pass pass, std::int64_t rows,
                              GraphChoice choice = {});

/// Times of the bare GEMMs by stage, a rank's rows spread evenly over its experts; 0 where a stage
/// has none.
using GemmSeconds = std::array<double, kMaxStages>;

/// What a link between two GPUs carries in one direction at best (H200, NVLink 4), in bytes/s.
inline constexpr double kLinkBytesPerSecond = 370e9;

/// What no schedule can go below. The GEMMs keep the tensor cores busy and the wire is used beside
/// them, so a direction's floor is the longer of the two; each is that of the busiest rank, for no
/// rank can do another's share.
struct Floors {
  std::vector<GemmSeconds> gemms{};  ///< [rank]
  std::vector<WireRows> wire{};      ///< [rank]
  std::int64_t hidden = 0;

  /// Nothing where a stage has neither a GEMM nor bytes to move.
  std::optional<double> of(Stage stage) const;
  std::optional<double> of(Pass pass) const;

 private:
  double gemms_s(std::span<const Stage> stages) const;
  double wire_s(bool pulls, bool pushes) const;
};

/// Elements of a direction's tensors that are not what they should be.
struct Wrong {
  std::int64_t compared = 0;
  std::int64_t differing = 0;  ///< in a bit from schedule sequential
  std::int64_t sampled = 0;
  std::int64_t inexact = 0;     ///< too far from float64
  std::int64_t not_finite = 0;  ///< of these, infinite or NaN

  std::int64_t total() const { return differing + inexact; }
  /// Nothing but numbers that left the range of bf16 or fp32, under every schedule alike.
  bool is_overflow() const { return not_finite > 0 && total() == not_finite; }
  Wrong& operator+=(const Wrong& other);
};

/// What was measured of one direction under one schedule.
struct BenchPass {
  Pass pass = Pass::kForward;
  std::vector<std::vector<PassStats>> stats{};  ///< [rank][pass]
  std::optional<Wrong> wrong{};

  std::size_t passes() const { return stats.empty() ? 0 : stats.front().size(); }
};

/// The seconds of every pass, on the rank whose median is largest.
std::vector<double> pass_seconds(const BenchPass& measured);

/// A row of the table: a direction, or one of its stages.
struct BenchRow {
  Pass pass = Pass::kForward;
  std::optional<Stage> stage{};
  std::vector<double> seconds{};  ///< of the slowest rank, that with the largest median
  std::optional<double> floor_s{};
  std::optional<double> tflops{};  ///< of a rank on average, real rows only
  std::optional<double> gbps{};    ///< over the wire, of a rank on average
  std::optional<std::int64_t> wrong{};
};

/// The direction, then its stages. `rows` are those of all ranks; without `floors` there are none.
std::vector<BenchRow> bench_rows(const BenchPass& measured, const workload::ShapeSpec& spec,
                                 std::int64_t rows, const std::optional<Floors>& floors);

}  // namespace uniep::tool
