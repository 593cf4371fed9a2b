#pragma once

#include <iosfwd>

#include "common/step_choices.h"
#include "uniep/problem.h"
#include "workload/synthetic.h"

namespace uniep::tool {

/// Prints what one rank of a layer of that shape allocates, by purpose. `capacity` is
/// Problem::capacity_rows; 0: the default. Throws Error(kInvalidArgument) where shape
/// and ranks make no problem.
void print_memory(std::ostream& out, const workload::ShapeSpec& spec, int ranks,
                  std::int64_t capacity, const KeptFlags& kept);

/// Bytes of one rank of a layer, as PyTorch allocates them.
struct RankBytes {
  std::int64_t shared = 0;  ///< as long as the layer: what all layers of a shape have together
  std::int64_t kept = 0;    ///< by each forward until its backward: saved rows and the plan
  std::int64_t plan = 0;    ///< of that, the plan: what is in no row pool either
  std::int64_t pass = 0;    ///< what the larger pass works in
};

/// What calls take memory for: the capacity, or with exact_rows what came.
struct StepRows {
  std::int64_t rows = 0;      ///< pad rows included
  std::int64_t received = 0;  ///< tokens that have rows, each once
};

/// As many rows as there is room for, or `rows` of as many different tokens as there can be.
StepRows room_for(const Problem& problem, int ranks);
StepRows room_for(const Problem& problem, int ranks, std::int64_t rows);

RankBytes rank_bytes(const Problem& problem, int ranks, const StepRows& rows, int hosts = 1);

/// The rows of one rank if every expert has the same share, and tokens choose theirs apart.
StepRows balanced_rows(const Problem& problem, int ranks);

/// Elements of the experts' weights of one rank, w1 and w2.
std::int64_t weight_parameters(const Problem& problem, int ranks);

/// The sum of what it prints: bytes of one rank.
std::int64_t layer_memory(const Problem& problem, int ranks, int hosts = 1);

}  // namespace uniep::tool
