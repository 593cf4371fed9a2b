#pragma once

#include <string>
#include <vector>

#include "bench/bench_report.h"

namespace uniep::tool {

/// "fastest: single, 1.31x sequential forward, 1.22x backward (geometric mean over 5 shapes)":
/// which schedule takes the least time in the geometric mean over the layers that were measured
/// under all of them, and how many times as long the first one given takes, or the second fastest
/// where the first is the fastest. Empty where there are no two to compare.
std::string fastest_text(const std::vector<BenchEntry>& entries, const BenchOptions& options);

}  // namespace uniep::tool
