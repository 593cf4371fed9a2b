#pragma once

#include <functional>
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
  std::string search;  ///< whatever makes it another search than those of the same key
  std::string date;
  std::vector<SessionCandidate> candidates;
};

/// The file of a search beside the cache.
std::string session_path(const std::string& cache_path, const TuneKey& key,
                         const std::string& search);

void save_session(const std::string& path, const Session& session);

/// Why a schedule cannot be measured, or nothing where it can.
using Refusal = std::function<std::optional<std::string>(const Schedule&)>;

/// The session that is stored there, if it is of the same search. One that cannot be used, one that
/// has a schedule which `refusal` refuses among them, is reported in `problems`.
std::optional<Session> load_session(const std::string& path, const TuneKey& key,
                                    const std::string& search, const Refusal& refusal,
                                    std::vector<std::string>& problems);

void remove_session(const std::string& path);

}  // namespace uniep::tune
