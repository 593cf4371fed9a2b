#pragma once

#include <vector>

#include "api/c_support.h"

// What calls of passes are in C++.

namespace uniep::c_api {

/// The tensors of a weight, or its gradient, that has one for each expert: what ExpertMatrices
/// refer to.
template <class T>
using TensorList = std::vector<std::span<T>>;

struct Forward {
  std::span<const std::int32_t> topk_ids;
  TensorList<const bf16> w1, w2;
  uniep::ForwardArgs args;
  CallOptions plan_options, options;
};

enum class Part : std::int32_t { kWhole, kData, kWeights };

struct Backward {
  Part part = Part::kWhole;
  uniep::Saved restored;           // of the caller's memory
  uniep::Saved* pooled = nullptr;  // of a layer with a row pool
  TensorList<const bf16> w1, w2;
  TensorList<bf16> dw1, dw2;
  TensorList<float> fp32_dw1, fp32_dw2;
  uniep::BackwardDataArgs data;
  uniep::BackwardWeightsArgs weights;
  CallOptions options;

  uniep::Saved& saved() { return pooled != nullptr ? *pooled : restored; }
};

Forward forward_of(uniep_layer& l, const uniep_forward_call* call);

/// Plans the routing. Where the call wants memory of the rows that came, waits until they are known
/// and asks for it.
uniep::RoutingPlan plan_of(uniep_layer& l, const uniep_forward_call* call, Forward& f);

Part part_of(const uniep_backward_call* call);

Backward backward_of(uniep_layer& l, const uniep_backward_call* call);

uniep::BackwardArgs whole(const Backward& b);

}  // namespace uniep::c_api
