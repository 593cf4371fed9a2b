#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "bench/bench_report.h"
#include "bench/device_ranks.h"

namespace uniep::tool {

/// Measures layer after layer, prints each, and shows how it comes along. Ends after the one in
/// which an Interrupt was requested.
std::vector<BenchEntry> measure_cases(const std::vector<BenchCase>& cases, BenchOptions options,
                                      const Ranks& ranks);

bool was_interrupted(const std::vector<BenchEntry>& entries);

/// "interrupted after 37 of 120 measured passes", of so many layers.
std::string interrupted_text(const std::vector<BenchEntry>& entries, std::size_t cases,
                             const BenchOptions& options);

}  // namespace uniep::tool
