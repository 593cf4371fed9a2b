#pragma once

#include <span>
#include <string_view>

namespace uniep::tune {

/// A JSON file of the repository that is compiled in, so that a program finds it wherever it runs.
struct ShippedFile {
  std::string_view name;  ///< without its ending
  std::string_view text;
};

std::span<const ShippedFile> shipped_profiles();   ///< profiles/*.json
std::span<const ShippedFile> shipped_schedules();  ///< tuned/*.json

}  // namespace uniep::tune
