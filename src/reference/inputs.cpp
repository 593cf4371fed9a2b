#include "reference/inputs.h"

#include "base/check.h"
#include "reference/bounded.h"

namespace uniep::reference {
namespace {

template <class T>
std::vector<T> widen(const std::vector<bf16>& values) {
  std::vector<T> wide;
  wide.reserve(values.size());
  for (const bf16 v : values) wide.push_back(T{to_float(v)});
  return wide;
}

template <class T>
std::vector<T> widen(const std::vector<float>& values) {
  std::vector<T> wide;
  wide.reserve(values.size());
  for (const float v : values) wide.push_back(T{v});
  return wide;
}

template <class Values>
void check_size(const char* name, const Values& values, std::int64_t wanted) {
  require(static_cast<std::int64_t>(values.size()) == wanted, ErrorCode::kInvalidArgument, name,
          " has ", values.size(), " elements; the layer's shape asks for ", wanted);
}

void check(const LayerData& d) {
  require(d.tokens >= 0 && d.hidden > 0 && d.intermediate > 0 && d.num_experts > 0 && d.topk > 0,
          ErrorCode::kInvalidArgument, "layer of tokens=", d.tokens, ",hidden=", d.hidden,
          ",intermediate=", d.intermediate, ",num_experts=", d.num_experts, ",topk=", d.topk,
          "; only tokens may be 0, and none negative");
  check_size("x", d.x, d.tokens * d.hidden);
  check_size("topk_ids", d.topk_ids, d.tokens * d.topk);
  check_size("topk_probs", d.topk_probs, d.tokens * d.topk);
  check_size("w1", d.w1, d.num_experts * d.w1_rows() * d.hidden);
  check_size("w2", d.w2, d.num_experts * d.hidden * d.intermediate);
  if (!d.dy.empty()) check_size("dy", d.dy, d.tokens * d.hidden);
  check_size("shared_w1", d.shared_w1, d.shared_experts * d.w1_rows() * d.hidden);
  check_size("shared_w2", d.shared_w2, d.shared_experts * d.hidden * d.intermediate);
  if (!d.shared_probs.empty()) {
    check_size("shared_probs", d.shared_probs, d.tokens * d.shared_experts);
  }
  if (!d.has_bias() && d.b2.empty()) return;
  check_size("b1", d.b1, d.num_experts * d.w1_rows());
  check_size("b2", d.b2, d.num_experts * d.hidden);
}

std::vector<float> shared_probs(const LayerData& d) {
  if (!d.shared_probs.empty()) return d.shared_probs;
  return std::vector<float>(static_cast<std::size_t>(d.tokens * d.shared_experts), 1.0f);
}

}  // namespace

template <class T>
Inputs<T> widen(const LayerData& layer) {
  check(layer);
  return {.tokens = layer.tokens,
          .hidden = layer.hidden,
          .intermediate = layer.intermediate,
          .num_experts = layer.num_experts,
          .topk = layer.topk,
          .activation = layer.activation,
          .probs = layer.probs,
          .combine_groups = layer.combine_groups,
          .combine_partials = layer.combine_partials,
          .shared_experts = layer.shared_experts,
          .x = widen<T>(layer.x),
          .topk_ids = layer.topk_ids,
          .topk_probs = widen<T>(layer.topk_probs),
          .w1 = widen<T>(layer.w1),
          .w2 = widen<T>(layer.w2),
          .dy = widen<T>(layer.dy),
          .b1 = widen<T>(layer.b1),
          .b2 = widen<T>(layer.b2),
          .shared_w1 = widen<T>(layer.shared_w1),
          .shared_w2 = widen<T>(layer.shared_w2),
          .shared_probs = widen<T>(shared_probs(layer))};
}

template Inputs<float> widen(const LayerData&);
template Inputs<double> widen(const LayerData&);
template Inputs<Bounded> widen(const LayerData&);

}  // namespace uniep::reference
