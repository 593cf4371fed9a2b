#pragma once

#include <string>

#include "base/layer_data.h"
#include "common/option_names.h"
#include "workload/synthetic.h"

namespace uniep::tool {

/// What an expert computes: --activation, --probs and --bias, or --as-model; how a token's rows are
/// added up: --combine-groups and --combine-partials; and --shared-experts and --shared-gate.
struct ArithmeticFlags {
  std::string activation = "swiglu";
  std::string probs = "before";
  bool bias = false;
  int combine_groups = 1;
  std::string combine_partials = "fp32";
  int shared_experts = 0;
  bool shared_gate = false;
  bool as_model = false;  ///< what the model computes that a shape is named after

  /// Throws Error(kInvalidArgument) for --as-model of a shape that is of no model.
  void apply_to(workload::ShapeSpec& spec) const;
};

CLI::Option* add_activation(OptionGroup& group, std::string& activation);
/// All flags of it. --as-model is about `shape`, an option that is there already.
void add_arithmetic(OptionGroup& group, ArithmeticFlags& arithmetic, CLI::Option* shape);

/// A layer file's layer with that arithmetic. Throws Error(kIo) for --bias, --shared-experts or
/// --shared-gate where the file has none, or another number.
LayerData read_layer(const std::string& path, const ArithmeticFlags& arithmetic);

/// "gpt_oss, probs after, biases": what differs from SwiGLU's experts; empty: nothing does.
std::string arithmetic_text(const Problem& problem);

/// The words of result files: "swiglu", "gpt_oss,after,bias".
std::string arithmetic_words(const Problem& problem);

}  // namespace uniep::tool
