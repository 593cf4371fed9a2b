#pragma once

#include <span>

#include "bench/bench_case.h"
#include "bench/bench_figures.h"

namespace uniep::tool {

/// Times every product of a layer by batched cuBLAS on this rank's GPU: one call for all local
/// experts, each with an equal share of the rank's rows. cuBLAS must not be missing.
GemmSeconds time_gemms(const BenchCase& bench, int rank, const BenchOptions& options,
                       std::span<const bf16> w1, std::span<const bf16> w2);

}  // namespace uniep::tool
