#include "run/shared_layer.h"

#include "workload/split.h"

namespace uniep::tool {
namespace {

template <class T>
std::vector<T> rows_of(const std::vector<T>& tensor, const workload::Part& tokens,
                       std::int64_t width) {
  if (tensor.empty()) return {};
  return {tensor.begin() + tokens.begin * width, tensor.begin() + tokens.end * width};
}

LayerData shared_layer(const LayerData& layer, const workload::Part& tokens) {
  const int shared = layer.shared_experts;
  LayerData own{.tokens = tokens.size(),
                .hidden = layer.hidden,
                .intermediate = layer.intermediate,
                .num_experts = shared,
                .topk = shared,
                .activation = layer.activation,
                .probs = layer.probs,
                .x = rows_of(layer.x, tokens, layer.hidden),
                .topk_ids = {},
                .topk_probs = rows_of(layer.shared_probs, tokens, shared),
                .w1 = layer.shared_w1,
                .w2 = layer.shared_w2,
                .dy = rows_of(layer.dy, tokens, layer.hidden)};
  const auto slots = static_cast<std::size_t>(tokens.size() * shared);
  for (std::size_t i = 0; i < slots; ++i) {
    own.topk_ids.push_back(static_cast<std::int32_t>(i % static_cast<std::size_t>(shared)));
  }
  if (layer.shared_probs.empty()) own.topk_probs.assign(slots, 1.0f);
  return own;
}

}  // namespace

std::vector<LayerData> shared_layers(const LayerData& layer, int ranks) {
  std::vector<LayerData> layers;
  if (layer.shared_experts == 0) return layers;
  const std::vector<std::int64_t> begin = workload::even_parts(layer.tokens, ranks);
  for (std::size_t r = 0; r + 1 < begin.size(); ++r) {
    layers.push_back(shared_layer(layer, {begin[r], begin[r + 1]}));
  }
  return layers;
}

}  // namespace uniep::tool
