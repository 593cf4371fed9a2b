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

/// The sum of what it prints: bytes of one rank.
std::int64_t layer_memory(const Problem& problem, int ranks);

}  // namespace uniep::tool
