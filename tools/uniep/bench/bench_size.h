#pragma once

#include <string>

#include "uniep/backend.h"
#include "uniep/rank_layout.h"
#include "workload/synthetic.h"

namespace uniep::tool {

/// Throws Error(kCapacity) where measuring a layer on ranks of this process would need more memory
/// than is free, for `results` sets of what a step computes, or where a pass would take many
/// minutes. `what` is the layer in an error: "--shape tiny".
void require_measurable(const std::string& what, const workload::ShapeSpec& spec,
                        const RankLayout& layout, int results);

}  // namespace uniep::tool
