#include "common/arithmetic.h"

#include "base/activation_names.h"
#include "base/check.h"
#include "base/files.h"
#include "base/problem_limits.h"
#include "common/options.h"
#include "common/table.h"
#include "io/layer_file.h"

namespace uniep::tool {
namespace {

std::string joined(const std::string& text, const char* separator, const std::string& word) {
  return text.empty() ? word : cat(text, separator, word);
}

/// A file's shared experts are as flags say, if these say anything.
void require_shared(const LayerData& layer, const workload::ShapeSpec& spec,
                    const std::string& path) {
  require(spec.shared_experts == 0 || spec.shared_experts == layer.shared_experts, ErrorCode::kIo,
          display_name(path), ": has ", layer.shared_experts,
          " shared experts, and --shared-experts is ", spec.shared_experts,
          "; that number is accepted, or no --shared-experts");
  require(!spec.shared_gate || !layer.shared_probs.empty(), ErrorCode::kIo, display_name(path),
          ": has no tensor 'shared_probs', which --shared-gate needs; a file that has it is "
          "accepted, or no --shared-gate");
}

}  // namespace

void ArithmeticFlags::apply_to(workload::ShapeSpec& spec) const {
  spec.combine_groups = combine_groups;
  spec.combine_partials = combine_partials == name(CombinePartials::kBf16) ? CombinePartials::kBf16
                                                                           : CombinePartials::kFp32;
  spec.shared_experts = shared_experts;
  spec.shared_gate = shared_gate;
  if (as_model) return workload::set_model_arithmetic(spec);
  spec.activation = activation_named(activation).value_or(Activation::kSwiglu);
  spec.probs = probs == name(Probs::kAfter) ? Probs::kAfter : Probs::kBefore;
  spec.bias = bias;
}

CLI::Option* add_activation(OptionGroup& group, std::string& activation) {
  return group
      .add("--activation", activation, "NAME",
           "What an expert computes between its products: swiglu (default), geglu, geglu_tanh, "
           "reglu, gpt_oss, swiglu_clamped, swiglu_softcapped; or without a gate, so that w1 has I "
           "rows: relu2, gelu, silu")
      ->check(one_of(all_activation_names()));
}

void add_arithmetic(OptionGroup& group, ArithmeticFlags& arithmetic, CLI::Option* shape) {
  CLI::Option* activation = add_activation(group, arithmetic.activation);
  CLI::Option* probs =
      group
          .add("--probs", arithmetic.probs, "PLACE",
               "Where a row's probability is multiplied: before fc2 (default), or after it")
          ->check(one_of({name(Probs::kBefore), name(Probs::kAfter)}));
  CLI::Option* bias =
      group.add_flag("--bias", arithmetic.bias,
                     "Experts have biases b1 and b2; a layer file that has them needs no flag");
  group
      .add_flag("--as-model", arithmetic.as_model,
                "All three as the model has them that the shape is named after: gpt-oss-120b "
                "gpt_oss, after, biases; the other models swiglu, after")
      ->needs(shape)
      ->excludes(activation)
      ->excludes(probs)
      ->excludes(bias);
  group
      .add("--combine-groups", arithmetic.combine_groups, "G",
           "Experts are cut into G equal runs, and a token's rows are added up run by run, then "
           "the runs' sums (default 1: all rows, one after another)")
      ->check(range<int>(1, kMaxNumExperts));
  group
      .add("--combine-partials", arithmetic.combine_partials, "TYPE",
           "What the sums of runs are before they are added up: fp32 (default) or bf16")
      ->check(one_of({name(CombinePartials::kFp32), name(CombinePartials::kBf16)}));
  CLI::Option* shared =
      group
          .add("--shared-experts", arithmetic.shared_experts, "S",
               "Experts of the same size that every token goes to, besides its K, as part of the "
               "pass (default 0); a layer file that has them needs no flag")
          ->check(range<int>(0, kMaxTopk - 1));
  group
      .add_flag("--shared-gate", arithmetic.shared_gate,
                "What shared experts give a token counts by a sigmoid of its own, instead of once")
      ->needs(shared);
}

LayerData read_layer(const std::string& path, const ArithmeticFlags& arithmetic) {
  workload::ShapeSpec spec;
  arithmetic.apply_to(spec);
  LayerData layer = io::load_layer(path, spec.activation);
  layer.probs = spec.probs;
  layer.combine_groups = spec.combine_groups;
  layer.combine_partials = spec.combine_partials;
  require(layer.has_bias() || !spec.bias, ErrorCode::kIo, display_name(path),
          ": has no tensors 'b1' and 'b2', which --bias needs; a file that has them is accepted, "
          "or no --bias");
  require_shared(layer, spec, path);
  return layer;
}

std::string arithmetic_text(const Problem& problem) {
  std::string text;
  if (problem.activation != Activation::kSwiglu) text = name(problem.activation);
  if (problem.probs == Probs::kAfter) text = joined(text, ", ", "probs after");
  if (problem.bias) text = joined(text, ", ", "biases");
  if (problem.shared_experts > 0) {
    text = joined(text, ", ", counted(problem.shared_experts, "shared expert", "shared experts"));
  }
  if (problem.combine_groups == 1) return text;
  return joined(text, ", ",
                cat(problem.combine_groups, " combine groups in ", name(problem.combine_partials)));
}

std::string arithmetic_words(const Problem& problem) {
  return cat(name(problem.activation), problem.probs == Probs::kAfter ? ",after" : "",
             problem.bias ? ",bias" : "",
             problem.combine_groups == 1 ? ""
                                         : cat(",combine_groups=", problem.combine_groups, ",",
                                               name(problem.combine_partials)),
             problem.shared_experts == 0 ? "" : cat(",shared_experts=", problem.shared_experts));
}

}  // namespace uniep::tool
