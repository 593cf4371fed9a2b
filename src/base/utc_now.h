#pragma once

#include <string>

namespace uniep {

/// "2026-07-28T10:00:00Z"
std::string utc_now();

}  // namespace uniep
