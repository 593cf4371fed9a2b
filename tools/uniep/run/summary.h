#pragma once

#include <iosfwd>
#include <string>

#include "base/layer_data.h"
#include "common/machine.h"
#include "run/step.h"

namespace uniep::tool {

/// What a run is called in its printed and written reports.
struct RunHeader {
  Build build;
  Machine machine;
  std::string date;
  std::string command;
  std::string shape;      ///< short name: of the shape, or of the input file without its ending
  std::string input;      ///< where the layer came from
  bool made_up = false;   ///< by a shape, which names the tokens of a rank
  std::string link;       ///< emulated link; empty: none
  std::string sharing{};  ///< why times mean nothing; empty: ranks share no GPUs
};

/// Comment lines: everything that the figures below them depend on.
void print_header(std::ostream& out, const RunHeader& header, const LayerData& layer,
                  const StepOptions& options);

/// What the routing asks for; then for each direction a table of its stages, and what it moved,
/// waited and took. Of no measured step, the routing alone.
void print_figures(std::ostream& out, const StepReport& report);

/// "2048 tokens, hidden 256, intermediate 128, 32 experts, top-4"
std::string dimensions(const LayerData& layer);

}  // namespace uniep::tool
