#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/layer_data.h"
#include "common/arithmetic.h"
#include "run/step.h"
#include "uniep/problem.h"
#include "uniep/schedule.h"
#include "workload/synthetic.h"

namespace uniep::tool {

/// A schedule to be measured.
struct BenchSchedule {
  std::string given;                 ///< as --schedule has it
  std::optional<Schedule> schedule;  ///< nothing: auto
};

struct BenchOptions {
  int ranks = 1;
  int hosts = 1;  ///< that these are on
  std::vector<BenchSchedule> schedules;
  PassChoice passes = PassChoice::kBoth;
  int iterations = 15;  ///< measured passes
  int warmup = 3;       ///< passes before these
  bool check = true;
  bool floors = true;  ///< measure bare GEMMs, where the device has them
  /// Called on rank 0 after each pass of a direction.
  std::function<void(Pass)> passed = [](Pass) {};

  int passes_of_a_direction() const { return warmup + iterations; }
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

/// One layer of a benchmark: a shape that is made up, or what a file holds. The tensors of one that
/// is made up are never held in one place: each element follows from `numbers_of`, wherever it is
/// needed.
struct BenchCase {
  std::string name;          ///< as given, or that of the file
  workload::ShapeSpec spec;  ///< its tokens are the most that a rank has
  int ranks = 1;
  int hosts = 1;  ///< that these are on
  std::uint64_t seed = 0;
  double skew = 0;                           ///< of a file, as measured
  std::string file{};                        ///< empty: made up
  std::shared_ptr<const LayerData> layer{};  ///< what it holds
  std::vector<std::int64_t> token_begin{};   ///< [ranks + 1]
  workload::Routing routing{};
  std::vector<float> shared_probs{};  ///< [tokens of all, S]; empty: each is 1
  std::vector<std::int64_t> rows_per_expert{};
  Problem problem{};

  std::int64_t local_experts() const { return spec.num_experts / ranks; }
  std::int64_t w1_rows() const { return halves(problem) * spec.intermediate; }  ///< of an expert
  std::int64_t first_token(int rank) const { return token_begin[static_cast<std::size_t>(rank)]; }
  std::int64_t tokens(int rank) const { return first_token(rank + 1) - first_token(rank); }
  std::vector<std::int64_t> tokens_per_rank() const;
  /// Whose token it is.
  int rank_of(std::int64_t token) const;
  bool has_dy() const { return layer == nullptr || !layer->dy.empty() || layer->tokens == 0; }
  std::int64_t rows() const;          ///< of all ranks, those of shared experts included
  std::int64_t rows(int rank) const;  ///< of the experts of one, without shared ones
  /// Rows of the experts of one rank and of its shared ones, pad rows included.
  std::int64_t padded_rows(int rank) const;
  /// Tokens that have rows of a rank's experts, each once.
  std::int64_t received_tokens(int rank) const;
};

/// The rows over the wire of every rank.
std::vector<WireRows> wire_rows(const BenchCase& bench);

/// Throws Error(kInvalidArgument) where the shape does not parse, has no such arithmetic, or ranks
/// do not divide its experts.
workload::ShapeSpec parse_bench_shape(const std::string& shape, int ranks,
                                      const ArithmeticFlags& arithmetic = {});

BenchCase make_case(const std::string& shape, int ranks, std::uint64_t seed, double skew,
                    const ArithmeticFlags& arithmetic = {});

/// A tensor of a layer that a file holds.
const std::vector<bf16>& tensor_of(const LayerData& layer, workload::Tensor tensor);

/// Throws Error(kInvalidArgument) for a file without dy, which a backward pass needs.
void require_dy(const BenchCase& bench, PassChoice passes);

/// The layer of a file, with its own routing.
BenchCase read_case(const std::string& path, int ranks, const ArithmeticFlags& arithmetic = {});

/// Room for the fullest rank, and for twice a balanced load, as a training job would set it: what
/// any routing could need does not fit a GPU at the shapes of large models.
std::int64_t bench_capacity(const Problem& problem, int ranks,
                            const std::vector<std::int64_t>& rows_per_expert);

}  // namespace uniep::tool
