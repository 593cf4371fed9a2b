#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "uniep/macros.h"

namespace uniep {

/// What kind of failure an `Error` reports; callers branch on this, people read `what()`.
enum class ErrorCode {
  kInvalidArgument,  ///< the caller passed something out of range; the sentence says what is
                     ///< accepted
  kUnsupported,      ///< valid, but this build or backend cannot do it
  kCapacity,         ///< rows that a routing brings, or memory that a layer needs, do not fit
  kTimeout,          ///< a wait passed its time limit (UNIEP_TIMEOUT_MS); see `Error::wait()`
  kPeerFailed,       ///< another rank reported an error; the sentence repeats it
  kDevice,           ///< the CUDA driver or a kernel failed
  kIo,               ///< a file could not be read, written or understood
  kInternal,         ///< a broken invariant of the library itself
};

/// Who waited for what when a wait expired. Fields that do not apply are -1.
struct WaitReport {
  int rank = -1;               ///< the rank that waited
  std::string stage;           ///< the stage whose task waited
  std::int64_t tile = -1;      ///< index of that task's tile within its stage
  int peer = -1;               ///< the rank whose signal is missing
  std::uint64_t expected = 0;  ///< count that would have ended the wait
  std::uint64_t seen = 0;      ///< count when the limit passed
  std::int64_t limit_ms = 0;   ///< the limit
};

/// The only exception type that the library throws on purpose.
class UNIEP_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& sentence) : std::runtime_error(sentence), code_(code) {}
  Error(const WaitReport& wait, const std::string& sentence)
      : std::runtime_error(sentence), code_(ErrorCode::kTimeout), wait_(wait) {}

  ErrorCode code() const noexcept { return code_; }
  const std::optional<WaitReport>& wait() const noexcept { return wait_; }

 private:
  ErrorCode code_;
  std::optional<WaitReport> wait_;
};

}  // namespace uniep
