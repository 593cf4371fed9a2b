#pragma once

#include <string>

namespace uniep::tool {

/// The variables that are set and called UNIEP_..., but that nothing reads, each with the nearest
/// that is read. Empty: there are none.
std::string unknown_variables_text();

/// Prints a line on stderr about such variables for the subcommand of this command line. Of the
/// ranks of a group only one process prints it.
void warn_of_environment(int argc, char** argv);

}  // namespace uniep::tool
