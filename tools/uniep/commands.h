#pragma once

#include <string>
#include <vector>

#include "common/option_names.h"

namespace uniep::tool {

/// What a subcommand knows of its call and leaves behind.
struct Invocation {
  std::string command;                 ///< the command line, for reports
  std::vector<std::string> arguments;  ///< as given, the program's name first
  int exit_code = 0;
};

// Each adds a subcommand, which runs when the command line has been parsed. `invocation` must
// outlive the parsing. What goes wrong is thrown as uniep::Error.
void add_run(CLI::App& app, Invocation& invocation);
void add_bench(CLI::App& app, Invocation& invocation);
void add_cache(CLI::App& app, Invocation& invocation);
void add_compare(CLI::App& app, Invocation& invocation);
void add_completion(CLI::App& app, Invocation& invocation);
void add_info(CLI::App& app, Invocation& invocation);
void add_profile(CLI::App& app, Invocation& invocation);
void add_simulate(CLI::App& app, Invocation& invocation);
void add_tune(CLI::App& app, Invocation& invocation);
void add_validate(CLI::App& app, Invocation& invocation);

// Exit codes, the same for all subcommands.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;    ///< a check found a difference, a pass failed, or what
                                         ///< a search found could not be stored
inline constexpr int kExitBadInput = 2;  ///< arguments or files that cannot be used
// And what Interrupt::exit_code says where SIGINT or SIGTERM ended it with what it had.

}  // namespace uniep::tool
