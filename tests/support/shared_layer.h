#pragma once

#include <cstdint>
#include <type_traits>

#include "base/layer_data.h"

namespace uniep::testing {

/// The shared experts of a part of the tokens, as a layer of their own.
inline LayerData shared_layer_of(const LayerData& d, std::int64_t begin, std::int64_t end) {
  const auto rows = [&](const auto& tensor, std::int64_t width) {
    if (tensor.empty()) return tensor;
    return std::decay_t<decltype(tensor)>(tensor.begin() + begin * width,
                                          tensor.begin() + end * width);
  };
  LayerData part{.tokens = end - begin,
                 .hidden = d.hidden,
                 .intermediate = d.intermediate,
                 .num_experts = d.shared_experts,
                 .topk = d.shared_experts,
                 .activation = d.activation,
                 .probs = d.probs,
                 .x = rows(d.x, d.hidden),
                 .topk_ids = {},
                 .topk_probs = rows(d.shared_probs, d.shared_experts),
                 .w1 = d.shared_w1,
                 .w2 = d.shared_w2,
                 .dy = rows(d.dy, d.hidden)};
  for (std::int64_t i = 0; i < part.tokens * part.topk; ++i) {
    part.topk_ids.push_back(static_cast<std::int32_t>(i % part.topk));
  }
  if (part.topk_probs.empty()) part.topk_probs.resize(part.topk_ids.size(), 1);
  return part;
}

}  // namespace uniep::testing
