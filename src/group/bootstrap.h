#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace uniep {

/// Exchange of small byte strings among the ranks of a group: for setting up and for agreeing on
/// arguments, never for moving tensors.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;

  /// Collective: element r of the result is what rank r passed. `limit_ms` after the call began it
  /// throws Error(kTimeout), which names `stage` and the first rank that has not come; then, and
  /// when the group has failed already, the group is unusable.
  virtual std::vector<std::string> all_gather(const std::string& bytes, const char* stage,
                                              int limit_ms) = 0;

  /// Throws where the group is known to have failed; never waits. For long waits outside of
  /// all_gather, which a lost rank should end before their time limit does.
  virtual void check() {}
};

}  // namespace uniep
