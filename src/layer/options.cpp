#include "layer/options.h"

#include "base/check.h"
#include "base/env.h"

namespace uniep {
namespace {

bool in_range(int timeout_ms) { return timeout_ms >= 0 && timeout_ms <= kLongestWaitMs; }

}  // namespace

void validate(const LayerOptions& options) {
  require(in_range(options.timeout_ms), ErrorCode::kInvalidArgument, "options.timeout_ms is ",
          options.timeout_ms, "; 1 to ", kLongestWaitMs,
          " is accepted, and 0 for UNIEP_TIMEOUT_MS");
}

int wait_limit_ms(const LayerOptions& options) {
  const bool given = options.timeout_ms != 0 && in_range(options.timeout_ms);
  return given ? options.timeout_ms : env_timeout_ms();
}

}  // namespace uniep
