#pragma once

#include <string>

#include "tune/model/machine_profile.h"

namespace uniep::tool {

/// The file of that name, or else the shipped profile.
tune::MachineProfile find_profile(const std::string& file_or_name);

/// "h200, ..."
std::string shipped_profile_names();

}  // namespace uniep::tool
