#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "step.h"
#include "uniep/problem.h"
#include "uniep/schedule.h"
#include "workload/synthetic.h"

namespace uniep::tool {

struct BenchOptions {
  int ranks = 1;
  std::vector<std::optional<Schedule>> schedules;  ///< nothing: auto
  PassChoice passes = PassChoice::kBoth;
  int iterations = 15;  ///< measured passes
  int warmup = 3;       ///< passes before these
  bool check = true;
  bool floors = true;  ///< measure bare GEMMs, where the device has them
};

/// Rows that a rank moves over the wire in one direction of a layer, at H elements each. Dispatch
/// takes every (source, token) once, combine every row that came from another rank.
struct WireRows {
  std::int64_t pulled = 0;    ///< in, by dispatch
  std::int64_t served = 0;    ///< out: what other ranks pull
  std::int64_t pushed = 0;    ///< out, by combine
  std::int64_t returned = 0;  ///< in: what other ranks push

  friend bool operator==(const WireRows&, const WireRows&) = default;
};

/// One shape of a benchmark. Its tensors are never held in one place: each element follows from
/// `numbers_of`, wherever it is needed.
struct BenchCase {
  std::string name;  ///< as given
  workload::ShapeSpec spec;
  int ranks = 1;
  std::uint64_t seed = 0;
  double skew = 0;
  workload::Routing routing{};
  std::vector<std::int64_t> rows_per_expert{};
  Problem problem{};

  std::int64_t local_experts() const { return spec.num_experts / ranks; }
  std::int64_t rows() const;          ///< of all ranks
  std::int64_t rows(int rank) const;  ///< of the experts of one
};

/// Of every rank.
std::vector<WireRows> wire_rows(const BenchCase& bench);

/// Throws Error(kInvalidArgument) where the shape does not parse, or ranks do not divide its
/// experts.
workload::ShapeSpec parse_bench_shape(const std::string& shape, int ranks);

BenchCase make_case(const std::string& shape, int ranks, std::uint64_t seed, double skew);

/// Room for the fullest rank, and for twice a balanced load, as a training job would set it: what
/// any routing could need does not fit a GPU at the shapes of large models.
std::int64_t bench_capacity(const Problem& problem, int ranks,
                            const std::vector<std::int64_t>& rows_per_expert);

}  // namespace uniep::tool
