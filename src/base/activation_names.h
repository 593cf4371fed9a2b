#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "uniep/problem.h"

namespace uniep {

/// The activation of that name; nothing: there is none.
inline std::optional<Activation> activation_named(std::string_view text) {
  for (int i = 0; i < kNumActivations; ++i) {
    const auto activation = static_cast<Activation>(i);
    if (text == name(activation)) return activation;
  }
  return std::nullopt;
}

inline std::vector<std::string> all_activation_names() {
  std::vector<std::string> names;
  for (int i = 0; i < kNumActivations; ++i) names.emplace_back(name(static_cast<Activation>(i)));
  return names;
}

/// "swiglu, geglu, ...", for sentences.
inline std::string activation_names() {
  std::string text;
  for (const std::string& name : all_activation_names()) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace uniep
