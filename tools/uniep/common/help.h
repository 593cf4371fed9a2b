#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace uniep::tool {

/// A help text whose lines take at most kTextColumns: descriptions go on below themselves, examples
/// behind a backslash, so that a shell takes them as they stand.
std::string narrowed(std::string_view help);

/// Prints the help of all subcommands that are added behind it.
class NarrowHelp final : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override {
    return narrowed(CLI::Formatter::make_help(app, std::move(name), mode));
  }
};

}  // namespace uniep::tool
