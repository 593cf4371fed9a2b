#include <filesystem>
#include <iostream>
#include <memory>

#include "base/activation_names.h"
#include "base/check.h"
#include "commands.h"
#include "common/arithmetic.h"
#include "common/options.h"
#include "io/layer_file.h"

namespace uniep::tool {
namespace {

/// What `uniep run` can do with a layer that has no findings.
std::string verdict(const io::LayerSummary& layer) {
  const bool both = layer.has_dy || layer.tokens == 0;
  return both ? "is good"
              : "is good for a forward pass (uniep run --pass forward): it has no tensor dy, which "
                "a backward pass needs";
}

int validate_file(const std::filesystem::path& path, const std::string& activation) {
  const io::LayerCheck check =
      io::check_layer(path, activation_named(activation).value_or(Activation::kSwiglu));
  if (check.summary) std::cout << io::to_string(*check.summary) << '\n';
  if (check.findings.empty()) {
    std::cout << path.string() << ' ' << verdict(*check.summary) << '\n';
    return kExitOk;
  }
  const std::size_t n = check.findings.size();
  std::cout << path.string() << " cannot be used, for " << n << (n == 1 ? " reason" : " reasons")
            << " on stderr" << std::endl;  // before them, where both go to one place
  for (const std::string& finding : check.findings) {
    std::cerr << "uniep validate: " << finding << '\n';
  }
  return kExitBadInput;
}

}  // namespace

void add_validate(CLI::App& app, Invocation& invocation) {
  CLI::App* sub = add_command(app, "validate", "Check a layer file and say what is wrong with it");
  const auto path = std::make_shared<std::string>();
  const auto activation = std::make_shared<std::string>("swiglu");
  OptionGroup group(*sub);
  group
      .add("FILE", *path, "FILE.safetensors",
           "A safetensors file with x, topk_ids, topk_probs, w1, w2 [, dy] [, b1, b2]")
      ->required();
  add_activation(group, *activation);
  sub->footer(
      "Prints a summary, and on stderr every reason why the file cannot be used. Exits with 0 "
      "where `uniep run --input FILE` would take "
      "the file, without dy for --pass forward only, else with 2.\n\nExample:\n  uniep validate "
      "data/moe_lm_layer.safetensors");
  sub->callback([path, activation, &invocation] {
    invocation.exit_code = validate_file(*path, *activation);
  });
}

}  // namespace uniep::tool
