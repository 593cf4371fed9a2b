#pragma once

#include <iosfwd>

namespace uniep::tool {

/// Prints the stages, tensors and counters of the layer.
void print_graph(std::ostream& out);

}  // namespace uniep::tool
