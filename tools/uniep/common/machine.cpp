#include "common/machine.h"

#include <fstream>

#include "base/check.h"
#include "base/cpu_info.h"
#include "commit.h"
#include "cpu/kernels/kernels.h"
#include "uniep/version.h"

namespace uniep::tool {
namespace {

std::string compiler() {
#if defined(__clang__)
  return cat("Clang ", __clang_major__, ".", __clang_minor__, ".", __clang_patchlevel__);
#elif defined(__GNUC__)
  return cat("GCC ", __GNUC__, ".", __GNUC_MINOR__, ".", __GNUC_PATCHLEVEL__);
#else
  return "unknown compiler";
#endif
}

bool needs_quotes(const std::string& word) {
  constexpr const char* kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+,./:@%";
  return word.empty() || word.find_first_not_of(kPlain) != std::string::npos;
}

std::string quoted(const std::string& word) {
  if (!needs_quotes(word)) return word;
  std::string s = "'";
  for (const char c : word) s += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return s + "'";
}

}  // namespace

Machine this_machine() { return {cpu_model(), usable_cpus(), cpu::kernels().name}; }

std::string to_string(const Machine& m) {
  return cat(m.cpu, ", ", m.cpus, m.cpus == 1 ? " CPU" : " CPUs", ", ", m.isa, " kernels");
}

Build this_build() {
  return {UNIEP_VERSION_STRING, UNIEP_COMMIT, UNIEP_BUILD_TYPE, compiler(), UNIEP_SANITIZER};
}

std::string to_string(const Build& b) {
  return cat(b.version, " (", b.commit.empty() ? "" : cat("commit ", b.commit, ", "), b.type, ", ",
             b.compiler, b.sanitizer.empty() ? "" : cat(", sanitizer ", b.sanitizer), ")");
}

std::string quoted_command(int argc, const char* const* argv) {
  std::string command;
  for (int i = 0; i < argc; ++i) {
    // The folder of the program says nothing about the run.
    const std::string word = argv[i];
    command += i == 0 ? word.substr(word.find_last_of('/') + 1) : cat(' ', quoted(word));
  }
  return command;
}

}  // namespace uniep::tool
