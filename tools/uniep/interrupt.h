#pragma once

namespace uniep::tool {

/// While it lives, SIGINT and SIGTERM do not end this process but are noted: work that goes on for
/// long looks, and ends with what it has. A second one, a second or more later, ends the process.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  static bool requested();
};

}  // namespace uniep::tool
