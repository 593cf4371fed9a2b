#pragma once

#include <string>
#include <vector>

namespace uniep::tool {

/// What may stand for a value on the command line, as far as a shell can propose it.
struct ProposedValues {
  bool files = false;
  std::vector<std::string> words{};
};

struct CompletedOption {
  std::vector<std::string> names;  ///< "--shape", "-h"; of a positional argument its name
  std::string meaning;             ///< a few words
  std::string type;                ///< "NAME"; empty: a flag without a value
  bool many = false;               ///< takes several values in a row
  ProposedValues values{};
};

struct CompletedCommand {
  std::string name;
  std::string meaning;
  std::vector<CompletedOption> options{};
  std::vector<CompletedOption> positionals{};
};

// Scripts for a shell to read: what can follow on the command line of `program`, whose own options
// are those of `main`.
std::string bash_completion(const std::string& program, const CompletedCommand& main,
                            const std::vector<CompletedCommand>& subcommands);
std::string zsh_completion(const std::string& program, const CompletedCommand& main,
                           const std::vector<CompletedCommand>& subcommands);

}  // namespace uniep::tool
