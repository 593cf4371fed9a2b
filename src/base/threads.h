#pragma once

#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"

namespace uniep {

/// A thread that runs `body`. Throws Error(kCapacity) where the process may not have one more.
template <class Thread = std::thread, class... Body>
Thread start_thread(Body&&... body) {
  try {
    return Thread(std::forward<Body>(body)...);
  } catch (const std::system_error& e) {
    throw Error(ErrorCode::kCapacity,
                cat("a thread cannot be started: ", e.code().message(),
                    "; fewer ranks or workers, or higher limits of threads (ulimit -u) and of "
                    "memory (ulimit -v), are accepted"));
  }
}

}  // namespace uniep
