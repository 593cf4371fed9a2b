#pragma once

#include <CLI/App.hpp>
#include <charconv>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <vector>

#include "base/check.h"
#include "base/quotes.h"
#include "common/step_choices.h"
#include "workload/synthetic.h"

// What the options of several subcommands share.

namespace uniep::tool {

/// CLI11 prints a description as it is, with its lines one below the other.
std::string described(std::string_view text);

/// An empty value, as of a shell variable that is unset, would pass for an option that is not
/// there.
CLI::Validator not_empty(const char* type);

// CLI11 is a header, so each file that makes a command or an option of it compiles most of it once
// more. These do so for all.

CLI::App* add_command(CLI::App& app, const char* name, const char* description);

/// Adds the options of one group of the help text.
class OptionGroup {
 public:
  OptionGroup(CLI::App& sub, std::string name) : sub_(sub), name_(std::move(name)) {}
  /// The options that are in no group of their own.
  explicit OptionGroup(CLI::App& sub);

  /// options.cpp lists the types that there are.
  template <class T>
  CLI::Option* add(const char* option, T& value, const char* type, std::string_view meaning);
  CLI::Option* add_flag(const char* option, bool& value, std::string_view meaning);

 private:
  CLI::App& sub_;
  std::string name_;
};

// The descriptions name ranges and defaults in words; CLI11's own notes of them read badly. Its
// conversions also make the largest number of one that is larger, and take other bases.
template <class T>
CLI::Validator range(T low, T high) {
  const auto check = [low, high](const std::string& text) -> std::string {
    T value{};
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    const bool ok = error == std::errc() && rest == end && value >= low && value <= high;
    const char* kind = std::is_integral_v<T> ? "an integer" : "a number";
    return ok ? "" : cat(in_quotes(text), " is not ", kind, " from ", low, " to ", high);
  };
  return {check, ""};
}
/// Its validator bears the names, by which `choices_of` finds them.
CLI::Validator one_of(std::vector<std::string> names);
/// What `one_of` accepts for an option; empty where any text may be right.
std::vector<std::string> choices_of(CLI::Option& option);
/// What `--ranks` of a group accepts; `ranks_accepted` says it in words.
CLI::Validator a_number_of_ranks();
CLI::Validator a_seed();
CLI::Validator a_skew();

// Options that mean the same wherever they are.
CLI::Option* add_seed(OptionGroup& group, std::uint64_t& seed);
CLI::Option* add_skew(OptionGroup& group, double& skew);
CLI::Option* add_dropped(OptionGroup& group, double& share);
void add_pass(OptionGroup& group, std::string& pass);
void add_backend(OptionGroup& group, std::string& backend);
void add_json(OptionGroup& group, std::string& path);

void add_kept(OptionGroup& group, KeptFlags& kept);

/// Adds --hosts of a group of CPU ranks; `without` says on how many they are if it is not given. 0:
/// not given.
void add_hosts(OptionGroup& group, int& hosts, std::string_view without);

}  // namespace uniep::tool
