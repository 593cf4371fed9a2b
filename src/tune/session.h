#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tune/cache.h"

namespace uniep::tune {

struct SessionCandidate {
  Schedule schedule;
  double predicted_s = 0;       ///< 0: not predicted
  std::vector<double> seconds;  ///< as measured, in order
  bool rejected = false;        ///< its results had wrong bits
};

/// A search that was begun: what it measures, and what it has measured so far.
struct Session {
  TuneKey key;
  std::string space;  ///< how the space was restricted, and whatever else makes it another search
  std::string date;
  std::vector<SessionCandidate> candidates;
};

/// The file of a search beside the cache.
std::string session_path(const std::string& cache_path, const TuneKey& key,
                         const std::string& space);

void save_session(const std::string& path, const Session& session);

/// The session that is stored there, if it is of the same search. What cannot be used is reported
/// in `problems`, and left out.
std::optional<Session> load_session(const std::string& path, const TuneKey& key,
                                    const std::string& space, std::vector<std::string>& problems);

void remove_session(const std::string& path);

}  // namespace uniep::tune
