#pragma once

#include <CLI/App.hpp>
#include <string>

namespace uniep::tool {

/// The subcommand that was called; the program itself where none was, or where something before it
/// is wrong.
const CLI::App& called_app(const CLI::App& app);

/// "uniep", or "uniep run" where that is what was called.
std::string called(const CLI::App& app);

/// Throws Error(kInvalidArgument) where the first argument is no subcommand: CLI11 would only say
/// that one is missing.
void require_known_subcommand(const CLI::App& app, int argc, char** argv);

/// CLI11 would take any number for a flag's value: of `--check=0` it would make that there is none.
void refuse_values_of_flags(CLI::App& app);

/// What is wrong with a command line that CLI11 refused, in a sentence. A flag that does not exist
/// comes before everything that follows from it, such as a missing value.
std::string parse_complaint(const CLI::App& app, const CLI::ParseError& error);

}  // namespace uniep::tool
