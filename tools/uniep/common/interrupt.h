#pragma once

namespace uniep::tool {

/// While it lives, SIGINT and SIGTERM do not end this process but are noted: work that goes on for
/// long looks, and ends with what it has. A second one, a second or more later, ends the process.
/// If ranks are processes, a signal need not have reached all: rank 0 tells the others.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  static bool requested();
  /// What a program exits with that ended because of it, as shells have it: 128 + the signal.
  static int exit_code();
};

}  // namespace uniep::tool
