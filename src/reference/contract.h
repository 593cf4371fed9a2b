#pragma once

#include <vector>

#include "base/layer_data.h"

namespace uniep::reference {

/// The layer with exactly the roundings, orders and accumulators of the numerics contract: the CPU
/// backend returns these bits, whatever its schedule and number of ranks. Weight gradients are
/// bf16, +0 for an expert without rows. Accepts and throws what `exact` does; of a layer without dy
/// only `out` is computed.
LayerResult contract(const LayerData& layer);

/// `contract` with weight gradients as fp32 sums, added into main gradients of w1's and w2's
/// shapes, and of b1's and b2's if the layer has them. Those of an expert without rows keep every
/// bit, -0 included.
LayerResult contract_into_main_grad(const LayerData& layer, std::vector<float> main_dw1,
                                    std::vector<float> main_dw2, std::vector<float> main_db1 = {},
                                    std::vector<float> main_db2 = {});

/// `contract` with bf16 main gradients: old value and fp32 sum are added in fp32 and rounded once.
/// They come back as dw1, dw2, db1 and db2.
LayerResult contract_into_bf16_main_grad(const LayerData& layer, std::vector<bf16> main_dw1,
                                         std::vector<bf16> main_dw2,
                                         std::vector<bf16> main_db1 = {},
                                         std::vector<bf16> main_db2 = {});

}  // namespace uniep::reference
