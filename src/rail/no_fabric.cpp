#include "base/check.h"
#include "rail/rail.h"

// In builds without libfabric.

namespace uniep {

std::unique_ptr<Rail> make_rail(const RailOptions& options) {
  throw Error(ErrorCode::kUnsupported,
              cat("the group has ", options.layout.hosts,
                  " hosts, and this build has no transport between hosts; one host is accepted, or "
                  "a build with libfabric (Debian: libfabric-dev)"));
}

}  // namespace uniep
