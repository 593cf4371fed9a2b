#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tune/book/cache.h"

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
  std::string identity;  ///< whatever makes it another search than those of the same key
  std::string date;
  std::vector<SessionCandidate> candidates;
};

/// The file of a search beside the cache.
std::string session_path(const std::string& cache_path, const TuneKey& key,
                         const std::string& identity);

void save_session(const std::string& path, const Session& session);

/// Why a schedule cannot be measured, or nothing where it can.
using Refusal = std::function<std::optional<std::string>(const Schedule&)>;

/// The session that is stored there, if it is of the same search. One that cannot be used, one that
/// has a schedule which `refusal` refuses among them, is reported in `problems`.
std::optional<Session> load_session(const std::string& path, const TuneKey& key,
                                    const std::string& identity, const Refusal& refusal,
                                    std::vector<std::string>& problems);

/// A session as it lies beside a cache, whatever search it is of.
struct StoredSession {
  std::string path;
  std::string identity;        ///< what it measures, in words
  std::string date;            ///< when it began
  std::size_t candidates = 0;  ///< schedules in the race
  std::size_t measured = 0;    ///< passes so far
  std::string problem;         ///< why the rest is not known; empty: it is
};

/// The files of sessions beside a cache. Never throws for what they hold.
std::vector<std::string> session_files(const std::string& cache_path);
StoredSession describe_session(const std::string& path);

void remove_session(const std::string& path);

}  // namespace uniep::tune
