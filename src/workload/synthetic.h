#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/layer_data.h"
#include "uniep/problem.h"
#include "workload/random.h"

namespace uniep::workload {

/// The shape of a layer that is made up. `tokens` counts those of one rank.
struct ShapeSpec {
  std::string name;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  int num_experts = 0;
  int topk = 0;
  // Routing limited to groups of neighbouring experts, as DeepSeek-V3's: a token uses those of the
  // `topk_group` groups, of `n_group`, whose two best logits have the largest sum.
  int n_group = 1;
  int topk_group = 1;
  double dropped = 0;  ///< share of slots that are dropped, of which shapes say nothing
  // The arithmetic of its experts (Problem), of which shapes say nothing (set_model_arithmetic).
  Activation activation = Activation::kSwiglu;
  Probs probs = Probs::kBefore;
  bool bias = false;
  int combine_groups = 1;
  CombinePartials combine_partials = CombinePartials::kFp32;
  int shared_experts = 0;    ///< S
  bool shared_gate = false;  ///< what they give counts some number between 0 and 1 times

  friend bool operator==(const ShapeSpec&, const ShapeSpec&) = default;
};

/// The names that parse_shape knows: models, `tiny`, `small`, and last `custom`.
std::vector<std::string> shape_names();
std::vector<std::string> model_names();

/// Gives a shape the arithmetic of the model that it is named after. Error(kInvalidArgument) for
/// one that is of no model.
void set_model_arithmetic(ShapeSpec& spec);

/// "NAME[,key=value...]" with the keys tokens (per rank), hidden, intermediate, experts, topk,
/// which replace the figures of NAME; `custom` has none of its own and needs all five. Keys n_group
/// and topk_group, 1 if left out, limit the routing. Error(kInvalidArgument) names the key, its
/// value and what is accepted.
ShapeSpec parse_shape(std::string_view text);

/// The layer's problem, with room for `capacity_rows` (see Problem).
Problem problem_of(const ShapeSpec& spec, std::int64_t capacity_rows = 0);

/// "NAME,tokens=...,...": every key, but for limits that there are not; parse_shape reads it back.
/// What else a shape does not say is left out.
std::string to_string(const ShapeSpec& spec);

/// Bytes of all the tensors that make_layer returns.
std::int64_t layer_bytes(const ShapeSpec& spec, int ranks);

/// What make_layer puts into a tensor: element i is bf16(scale * value i of the stream).
struct Numbers {
  NormalStream stream;
  double scale;
};
enum class Tensor { kX, kDy, kW1, kW2, kB1, kB2, kSharedW1, kSharedW2 };
Numbers numbers_of(Tensor tensor, const ShapeSpec& spec, std::uint64_t seed);

/// What a gate makes of numbers N(0, 1): sigmoids [tokens, S] of tokens in global order, from token
/// `first`. Empty: the shape's shared experts have no gate.
std::vector<float> make_shared_probs(const ShapeSpec& spec, std::uint64_t seed, std::int64_t first,
                                     std::int64_t tokens);

/// The routing of make_layer's tokens, in global order.
struct Routing {
  std::vector<std::int32_t> topk_ids;
  std::vector<float> topk_probs;
};
Routing make_routing(const ShapeSpec& spec, int ranks, std::uint64_t seed, double skew);

/// A layer for `ranks` ranks in global order: x, dy ~ N(0, 1), w1 ~ N(0, 1/H), w2 ~ N(0, 1/I),
/// biases ~ N(0, 1/4), weights of shared experts as those of others;
/// router logits N(0, 1) - skew log(1 + e), so that 0 is balanced and 1 is like Zipf; the K largest
/// per token within the limit of groups, with softmax probabilities that sum to 1; then a share
/// `dropped` of the slots, drawn one by one, gets -1 and probability 0. The result is a function of
/// the shape, the total number of tokens, seed and skew alone: the same bits on every machine.
LayerData make_layer(const ShapeSpec& spec, int ranks, std::uint64_t seed, double skew);

}  // namespace uniep::workload
