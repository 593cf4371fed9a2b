#pragma once

#include <cmath>
#include <random>

#include "base/layer_data.h"

namespace uniep::reference {

struct RandomLayer {
  std::int64_t tokens = 7;
  std::int64_t hidden = 6;
  std::int64_t intermediate = 4;
  int num_experts = 4;
  int topk = 2;
  double dropped = 0;          ///< probability that a slot is -1
  int idle_expert = -1;        ///< an expert that gets no rows
  bool repeat_expert = false;  ///< every token goes topk times to one expert
  unsigned seed = 1;
  Activation activation = Activation::kSwiglu;
  Probs probs = Probs::kBefore;
  bool bias = false;
  int combine_groups = 1;
  CombinePartials combine_partials = CombinePartials::kFp32;
  double scale_of_h = 1;  ///< of w1: what is beyond an activation's limits needs large ones
};

/// Normally distributed numbers, scaled so that every tensor of the layer is of order 1.
inline LayerData make_layer(const RandomLayer& spec) {
  std::mt19937 bits(spec.seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  const auto fill = [&](std::int64_t size, double scale) {
    std::vector<bf16> values;
    for (std::int64_t i = 0; i < size; ++i) {
      values.push_back(to_bf16(static_cast<float>(scale * normal(bits))));
    }
    return values;
  };
  const auto pick_expert = [&] {
    std::int32_t id = spec.idle_expert;
    while (id == spec.idle_expert) {
      id = static_cast<std::int32_t>(bits() % static_cast<unsigned>(spec.num_experts));
    }
    return id;
  };

  LayerData d;
  d.tokens = spec.tokens;
  d.hidden = spec.hidden;
  d.intermediate = spec.intermediate;
  d.num_experts = spec.num_experts;
  d.topk = spec.topk;
  d.x = fill(d.tokens * d.hidden, 1);
  d.dy = fill(d.tokens * d.hidden, 1);
  d.activation = spec.activation;
  d.probs = spec.probs;
  d.combine_groups = spec.combine_groups;
  d.combine_partials = spec.combine_partials;
  d.w1 = fill(d.num_experts * d.w1_rows() * d.hidden,
              spec.scale_of_h / std::sqrt(static_cast<double>(d.hidden)));
  d.w2 = fill(d.num_experts * d.hidden * d.intermediate,
              1 / std::sqrt(static_cast<double>(d.intermediate)));
  for (std::int64_t slot = 0; slot < d.tokens * d.topk; ++slot) {
    const bool repeated = spec.repeat_expert && slot % d.topk != 0;
    d.topk_ids.push_back(repeated ? d.topk_ids.back() : pick_expert());
    d.topk_probs.push_back(static_cast<float>(0.1 + 0.9 * uniform(bits)));
  }
  for (std::int32_t& id : d.topk_ids) {
    if (uniform(bits) < spec.dropped) id = -1;
  }
  if (!spec.bias) return d;
  d.b1 = fill(d.num_experts * d.w1_rows(), 1);
  d.b2 = fill(d.num_experts * d.hidden, 1);
  return d;
}

}  // namespace uniep::reference
