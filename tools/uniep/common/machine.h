#pragma once

#include <string>

namespace uniep::tool {

/// What a figure depends on besides the run itself.
struct Machine {
  std::string cpu;  ///< model name
  int cpus = 0;     ///< logical CPUs that this process may use
  std::string isa;  ///< instruction set of the CPU kernels
};
Machine this_machine();
std::string to_string(const Machine& machine);

/// This program, as built.
struct Build {
  std::string version;
  std::string commit;  ///< "+" behind it: with changes that are not committed; may be empty
  std::string type;
  std::string compiler;
  std::string sanitizer;  ///< empty: none
};
Build this_build();
std::string to_string(const Build& build);

/// A command line that a shell reads as these words.
std::string quoted_command(int argc, const char* const* argv);

}  // namespace uniep::tool
