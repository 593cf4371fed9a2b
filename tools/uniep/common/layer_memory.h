#pragma once

#include <iosfwd>

#include "common/options.h"
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
  std::int64_t pass = 0;    ///< what the larger pass works in
};

/// Where calls take memory for `rows` rows: the capacity, or with exact_rows those that came.
RankBytes rank_bytes(const Problem& problem, int ranks, std::int64_t rows);

/// Rows of one rank, pad rows included, where every expert has the same share.
std::int64_t balanced_rows(const Problem& problem, int ranks);

/// Elements of the experts' weights of one rank, w1 and w2.
std::int64_t weight_parameters(const Problem& problem, int ranks);

/// The sum of what it prints: bytes of one rank.
std::int64_t layer_memory(const Problem& problem, int ranks);

}  // namespace uniep::tool
