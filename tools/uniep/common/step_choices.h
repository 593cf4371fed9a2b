#pragma once

#include <cstdint>
#include <string>

#include "uniep/problem.h"
#include "uniep/stage.h"

// What subcommands that run or plan steps are told of them.

namespace uniep::tool {

/// What forward keeps for backward, and what that works in: --save, --recompute-h and
/// --backward-rows.
struct KeptFlags {
  std::string save = "rows";
  bool recompute_h = false;
  std::int64_t backward_rows = 0;

  void apply_to(Problem& problem) const;
};

enum class PassChoice { kForward, kBackward, kBoth };

/// Whether a choice includes a direction.
bool measures(PassChoice choice, Pass pass);

}  // namespace uniep::tool
