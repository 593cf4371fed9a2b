#pragma once

#include <vector>

#include "base/layer_data.h"

namespace uniep::tool {

/// The shared experts of a layer as a layer of their own, of S experts to each of which each token
/// goes, once for each of `ranks` equal parts of the tokens: those that a rank's weight gradients
/// are sums over. Empty: there are none.
std::vector<LayerData> shared_layers(const LayerData& layer, int ranks);

}  // namespace uniep::tool
