#include "common/environment.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <system_error>

#include "base/check.h"
#include "base/env.h"
#include "base/quotes.h"

namespace uniep::tool {
namespace {

/// Whether another uniep has started this one as a rank: that one has spoken already.
bool started_by_uniep() {
  std::error_code unreadable;
  const auto own = std::filesystem::read_symlink("/proc/self/exe", unreadable);
  if (unreadable) return false;
  const auto parent = std::filesystem::read_symlink(cat("/proc/", getppid(), "/exe"), unreadable);
  return !unreadable && parent == own;
}

bool is_first_rank() {
  try {
    return env_rank().value_or(0) == 0;
  } catch (const Error&) {  // which the subcommand refuses, if it reads it
    return true;
  }
}

}  // namespace

std::string unknown_variables_text() {
  std::string text;
  for (const UnknownVariable& v : unknown_environment_variables()) {
    text += cat(text.empty() ? "" : ", ", shortened(v.name),
                v.nearest.empty() ? "" : cat(" (nearest: ", v.nearest, ")"));
  }
  return text;
}

void warn_of_environment(int argc, char** argv) {
  const bool called = argc > 1 && argv[1][0] != '-';
  if (!called || !is_first_rank() || started_by_uniep()) return;
  const std::string unknown = unknown_variables_text();
  if (unknown.empty()) return;
  std::fprintf(stderr, "uniep %s: warning: nothing reads the environment's %s; see uniep info\n",
               argv[1], unknown.c_str());
}

}  // namespace uniep::tool
