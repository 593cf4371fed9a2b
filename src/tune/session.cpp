#include "tune/session.h"

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/files.h"
#include "tune/shared_files.h"

namespace uniep::tune {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* kSchema = "uniep-tune-session-1";

/// What a file must say to be of this search.
std::string search_text(const TuneKey& key, const std::string& search) {
  return cat(to_string(key), ", ", key.driver, ", uniep ", key.library, ", ", search);
}

SessionCandidate candidate_from(const Json& json, const Refusal& refusal) {
  SessionCandidate c{
      parse_schedule(json.at("schedule").get<std::string>()), json.at("predicted_s").get<double>(),
      json.at("seconds").get<std::vector<double>>(), json.at("rejected").get<bool>()};
  const auto refused = refusal(c.schedule);
  require(!refused, ErrorCode::kIo, "its schedule ", to_string(c.schedule),
          " cannot run: ", refused.value_or(""));
  require(std::isfinite(c.predicted_s) && c.predicted_s >= 0, ErrorCode::kIo, "predicted_s is ",
          c.predicted_s, "; a finite number from 0 is accepted");
  for (const double seconds : c.seconds) {
    require(std::isfinite(seconds) && seconds > 0, ErrorCode::kIo, "a time of seconds is ", seconds,
            "; a finite number above 0 is accepted");
  }
  return c;
}

Session session_from(const Json& json, const Refusal& refusal) {
  Session s;
  s.date = json.at("date").get<std::string>();
  const Json& candidates = json.at("candidates");
  require(candidates.is_array() && !candidates.empty(), ErrorCode::kIo, "candidates is ",
          candidates.type_name(), " of ", candidates.size(), "; array of 1 or more is accepted");
  for (const Json& c : candidates) s.candidates.push_back(candidate_from(c, refusal));
  return s;
}

}  // namespace

std::string session_path(const std::string& cache_path, const TuneKey& key,
                         const std::string& search) {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : search_text(key, search)) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  return cat(cache_path, ".session-", std::hex, hash);
}

void save_session(const std::string& path, const Session& session) {
  Json candidates = Json::array();
  for (const SessionCandidate& c : session.candidates) {
    candidates.push_back({{"schedule", to_string(c.schedule)},
                          {"predicted_s", c.predicted_s},
                          {"seconds", c.seconds},
                          {"rejected", c.rejected}});
  }
  const Json file = {{"schema", kSchema},
                     {"search", search_text(session.key, session.search)},
                     {"date", session.date},
                     {"candidates", candidates}};
  replace_text(path, file.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

std::optional<Session> load_session(const std::string& path, const TuneKey& key,
                                    const std::string& search, const Refusal& refusal,
                                    std::vector<std::string>& problems) {
  try {
    const auto text = read_text(path);
    if (!text) return std::nullopt;
    const Json json = Json::parse(*text);
    require(json.at("schema").get<std::string>() == kSchema, ErrorCode::kIo, "its schema is not ",
            kSchema);
    // Two searches may share a hash.
    if (json.at("search").get<std::string>() != search_text(key, search)) return std::nullopt;
    Session session = session_from(json, refusal);
    session.key = key;
    session.search = search;
    return session;
  } catch (const std::exception& e) {
    problems.push_back(cat(path, " is ignored: ", e.what()));
    return std::nullopt;
  }
}

void remove_session(const std::string& path) { std::remove(path.c_str()); }

}  // namespace uniep::tune
