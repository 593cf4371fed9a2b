#pragma once

#include <iosfwd>

#include "workload/synthetic.h"

namespace uniep::tool {

/// Prints what one rank of a layer of that shape allocates, by purpose. `capacity` is
/// Problem::capacity_rows; 0: the default. Throws Error(kInvalidArgument) where shape
/// and ranks make no problem.
void print_memory(std::ostream& out, const workload::ShapeSpec& spec, int ranks,
                  std::int64_t capacity);

}  // namespace uniep::tool
