#pragma once

#include <string>

#include "support/scoped_env.h"
#include "support/temporary_folder.h"
#include "tune/book/tune_key.h"

namespace uniep::testing {

/// Stores `schedule` as what was tuned for such layers of the CPU backend.
inline void store_tuned(const std::string& path, const Problem& problem, int ranks, Pass pass,
                        const Schedule& schedule, double skew = 0) {
  const tune::TuneKey key =
      tune::tune_key(Backend::kCpu, problem, {1, ranks}, problem.max_tokens, skew, pass);
  tune::TuneCache(path).store({key, schedule, 1, 2, "2026-11-20T00:00:00Z"});
}

/// A cache of tuned schedules that layers look into while it lives.
class TunedCache {
 public:
  TunedCache() : path_(folder_.file("tuned.json")), env_("UNIEP_TUNE_CACHE", path_.c_str()) {}

  const std::string& path() const { return path_; }
  std::size_t files() const { return folder_.num_files(); }

 private:
  const TemporaryFolder folder_;
  const std::string path_;
  const ScopedEnv env_;
};

}  // namespace uniep::testing
