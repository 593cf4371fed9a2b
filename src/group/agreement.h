#pragma once

#include <functional>
#include <string>
#include <vector>

#include "group/bootstrap.h"
#include "uniep/stage.h"

namespace uniep {

/// Collective: every rank says which `call` it is making and whether its arguments are good, which
/// `check` finds out by throwing. Returns every rank's `payload`, which `check` may still set, when
/// all make the same call and none refuses; otherwise throws the same Error on all ranks, naming
/// the rank that refused or the calls that differ, before anything has been written.
std::vector<std::string> agree(Bootstrap& bootstrap, int limit_ms, Stage stage,
                               const std::string& call, const std::function<void()>& check,
                               const std::string& payload = "");

}  // namespace uniep
