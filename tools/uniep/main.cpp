#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>

#include "base/check.h"
#include "commands.h"
#include "machine.h"

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

/// "uniep", or "uniep run" when that is what was called.
std::string called(const CLI::App& app) {
  const auto subcommands = app.get_subcommands();
  return subcommands.empty() ? "uniep" : "uniep " + subcommands.front()->get_name();
}

/// Prints one line, whatever the message: scripts read the first, people the only one.
void complain(const CLI::App& app, std::string sentence) {
  std::ranges::replace(sentence, '\n', ' ');
  std::fprintf(stderr, "%s: %s\n", called(app).c_str(), sentence.c_str());
}

/// CLI11 would only say that a subcommand is missing.
void require_known_subcommand(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::string known;
  for (const CLI::App* sub : app.get_subcommands(nullptr)) {
    if (sub->get_name() == argv[1]) return;
    known += (known.empty() ? "" : ", ") + sub->get_name();
  }
  require(false, ErrorCode::kInvalidArgument, "there is no subcommand '", argv[1], "'; ", known,
          " are accepted");
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
    app.parse(argc, argv);
    require_printed();
    return invocation.exit_code;
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return print_help(app, e);
    complain(app, std::string(e.what()) + "; see " + called(app) + " --help");
    return kExitBadInput;
  } catch (const Error& e) {
    complain(app, e.what());
    return exit_code(e.code());
  } catch (const std::bad_alloc&) {
    complain(app, "out of memory; a smaller layer or a higher limit of memory is accepted");
    return exit_code(ErrorCode::kCapacity);
  } catch (const std::exception& e) {
    complain(app, std::string("internal error: ") + e.what());
  }
  return kExitFailed;
}

}  // namespace
}  // namespace uniep::tool

int main(int argc, char** argv) {
  using namespace uniep::tool;
  open_what_is_closed();
  signal(SIGXFSZ, SIG_IGN);  // the limit of a file's size is an error of the write that meets it
  Invocation invocation{.command = quoted_command(argc, argv), .arguments = {argv, argv + argc}};
  CLI::App app(
      "Deterministic expert-parallel MoE layers: run, measure, predict, tune, inspect, validate.",
      "uniep");
  app.set_version_flag("--version", to_string(this_build()), "Print the version and exit");
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 success; 1 a check found a difference, or a pass failed; 2 arguments or files "
      "that cannot be used.");
  add_run(app, invocation);
  add_bench(app, invocation);
  add_info(app, invocation);
  add_profile(app, invocation);
  add_simulate(app, invocation);
  add_tune(app, invocation);
  add_validate(app, invocation);
  return run(app, invocation, argc, argv);
}
