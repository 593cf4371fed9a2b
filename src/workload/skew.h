#pragma once

#include <cstdint>
#include <span>

#include "base/layer_data.h"

namespace uniep::workload {

/// The skew under which make_routing loads experts as unevenly as these rows say, whatever their
/// order: 0 to kMostMeasuredSkew in steps of 0.05. A pure function, the same on every machine.
double measured_skew(std::span<const std::int64_t> rows_per_expert, int topk);

/// The measured_skew of a layer's routing.
double skew_of(const LayerData& layer);

inline constexpr double kMostMeasuredSkew = 4;

}  // namespace uniep::workload
