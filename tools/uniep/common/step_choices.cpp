#include "common/step_choices.h"

#include <algorithm>

namespace uniep::tool {

void KeptFlags::apply_to(Problem& problem) const {
  problem.save = *std::ranges::find(kSaves, save, [](Save s) { return std::string(name(s)); });
  problem.recompute_h = recompute_h;
  problem.backward_rows = backward_rows;
}

bool measures(PassChoice choice, Pass pass) {
  if (choice == PassChoice::kBoth) return true;
  return (choice == PassChoice::kForward) == (pass == Pass::kForward);
}

}  // namespace uniep::tool
