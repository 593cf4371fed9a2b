#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/bench_case.h"
#include "uniep/problem.h"

// Which choices of what a forward keeps fit the memory of a rank, for all MoE layers of a model.

namespace uniep::tool {

/// What --memory, --layers, --in-flight and --weight-bytes say, as far as they are given.
struct MemoryFlags {
  std::optional<double> memory_gb;
  std::optional<int> layers;
  std::optional<int> in_flight;
  std::optional<double> weight_bytes;
};

/// A model's MoE layers on a rank, and its memory.
struct ModelMemory {
  double bytes = 0;  ///< that a rank has
  int layers = 1;
  int in_flight = 1;              ///< microbatches whose forward waits for its backward
  double bytes_of_parameter = 2;  ///< of the experts' weights, optimizer included
};

/// Nothing where no plan is asked for. Throws Error(kInvalidArgument) where a flag lacks another.
std::optional<ModelMemory> model_memory(const MemoryFlags& flags);

/// A choice of what a forward keeps, with its bytes of one rank and its time.
struct PlannedChoice {
  Save save = Save::kRows;
  bool recompute_h = false;
  bool exact_rows = false;
  std::int64_t backward_rows = 0;  ///< Problem::backward_rows; the same of all choices
  std::int64_t pool = 0;           ///< of `kept`: bytes of a row pool; 0: there is none
  std::int64_t rows = 0;           ///< that calls keep memory for
  std::int64_t kept = 0;           ///< of all layers and microbatches in flight
  std::int64_t pass = 0;           ///< what the larger pass works in
  std::int64_t shared = 0;         ///< by all layers
  std::int64_t weights = 0;        ///< of all layers
  double seconds = 0;              ///< forward and backward of all layers, of one microbatch

  std::int64_t total() const { return kept + pass + shared + weights; }
};

/// All choices at one number of ranks.
struct MemoryPlan {
  int ranks = 1;
  std::int64_t needed_capacity = 0;  ///< Problem::capacity_rows to be set; 0: the default will do
  bool one_stands_for_all = false;
  std::vector<PlannedChoice> choices{};
};

/// Seconds of forward and backward of one layer.
using PredictLayer = std::function<double(const BenchCase& bench)>;

/// Throws Error(kCapacity) where the bytes are beyond counting.
MemoryPlan plan_memory(const BenchCase& bench, const ModelMemory& model,
                       const PredictLayer& predict);

bool fits(const PlannedChoice& choice, const ModelMemory& model);

/// The fastest choice that fits; null if none does. Of choices of equal time the one that leaves
/// the host alone.
const PlannedChoice* fastest_that_fits(const MemoryPlan& plan, const ModelMemory& model);

/// The choice with the smallest total.
const PlannedChoice& smallest(const MemoryPlan& plan);

}  // namespace uniep::tool
