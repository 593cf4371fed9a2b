#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <string>

#include "base/check.h"
#include "base/error_of.h"
#include "commands.h"
#include "common/environment.h"
#include "common/help.h"
#include "common/machine.h"
#include "common/parse_errors.h"

namespace uniep::tool {
namespace {

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kUnsupported:
    case ErrorCode::kCapacity:
    case ErrorCode::kIo:
      return kExitBadInput;
    case ErrorCode::kTimeout:
    case ErrorCode::kPeerFailed:
    case ErrorCode::kDevice:
    case ErrorCode::kInternal:
      return kExitFailed;
  }
  return kExitFailed;
}

/// Prints one line, whatever the message: scripts read the first, people the only one.
void complain(const CLI::App& app, std::string sentence) {
  std::ranges::replace(sentence, '\n', ' ');
  std::fprintf(stderr, "%s: %s\n", called(app).c_str(), sentence.c_str());
}

void require_printed() {
  std::cout << std::flush;
  require(std::cout.good(), ErrorCode::kIo,
          "cannot write to the standard output; one that takes what is printed is needed");
}

/// What --help and --version ask for.
int print_help(const CLI::App& app, const CLI::ParseError& request) {
  app.exit(request);
  try {
    require_printed();
  } catch (const Error& e) {
    complain(app, e.what());
    return exit_code(e.code());
  }
  return kExitOk;
}

/// An output file must not become the standard output or error because that was closed.
void open_what_is_closed() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // For reading: what is printed there has to fail, as it would have.
    if (fcntl(descriptor, F_GETFD) == -1) (void)!open("/dev/null", O_RDONLY);
  }
}

int run(CLI::App& app, const Invocation& invocation, int argc, char** argv) {
  try {
    require_known_subcommand(app, argc, argv);
    warn_of_environment(argc, argv);
    app.parse(argc, argv);
    require_printed();
    return invocation.exit_code;
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return print_help(app, e);
    complain(app, parse_complaint(app, e));
    return kExitBadInput;
  } catch (const Error& e) {
    complain(app, e.what());
    return exit_code(e.code());
  } catch (const std::exception& e) {
    const Error error = error_of(e);
    const bool known = error.code() != ErrorCode::kInternal;
    complain(app, (known ? "" : "internal error: ") + std::string(error.what()));
    return exit_code(error.code());
  }
}

/// Whether there is memory for an exception: without any the runtime ends a process that throws
/// one.
bool has_memory_to_begin() {
  constexpr std::size_t kLeast = std::size_t{1} << 20;
  void* const memory = std::malloc(kLeast);
  std::free(memory);
  return memory != nullptr;
}

}  // namespace
}  // namespace uniep::tool

int main(int argc, char** argv) {
  using namespace uniep::tool;
  if (!has_memory_to_begin()) {
    std::fputs("uniep: out of memory; a higher limit of memory is accepted\n", stderr);
    return kExitBadInput;
  }
  open_what_is_closed();
  signal(SIGXFSZ, SIG_IGN);  // the limit of a file's size is an error of the write that meets it
  Invocation invocation{.command = quoted_command(argc, argv), .arguments = {argv, argv + argc}};
  CLI::App app(
      "Deterministic expert-parallel MoE layers: run, measure, predict, tune, inspect, validate.",
      "uniep");
  app.formatter(std::make_shared<NarrowHelp>());  // of all subcommands, too
  app.set_version_flag("--version", to_string(this_build()), "Print the version and exit");
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 success; 1 a check found a difference, or a pass failed; 2 arguments or files "
      "that cannot be used; 130 and 143 ended by Ctrl-C (SIGINT) and by SIGTERM.");
  add_run(app, invocation);
  add_bench(app, invocation);
  add_cache(app, invocation);
  add_compare(app, invocation);
  add_info(app, invocation);
  add_profile(app, invocation);
  add_simulate(app, invocation);
  add_tune(app, invocation);
  add_validate(app, invocation);
  add_completion(app, invocation);  // of all above
  refuse_values_of_flags(app);
  return run(app, invocation, argc, argv);
}
