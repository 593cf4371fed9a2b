#pragma once

#include "tune/model/machine_profile.h"

namespace uniep::testing {

/// Round figures: a second a tile of any product, and nothing for anything else.
inline tune::MachineProfile made_up_profile() {
  tune::MachineProfile p;
  p.name = "made-up";
  p.cores = 0;
  p.workers = 1;
  for (const Stage stage :
       {Stage::kFc1, Stage::kFc2, Stage::kDfc2, Stage::kDfc1, Stage::kWgrad2, Stage::kWgrad1}) {
    tune::GemmCost cost;
    cost.stage = stage;
    cost.fixed = 1;
    p.gemms.push_back(cost);
  }
  return p;
}

}  // namespace uniep::testing
