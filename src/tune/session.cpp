#include "tune/session.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "tune/files.h"

namespace uniep::tune {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* kSchema = "uniep-tune-session-1";

/// What a file must say to be of this search.
std::string search_text(const TuneKey& key, const std::string& space) {
  return cat(to_string(key), ", ", key.driver, ", uniep ", key.library, ", ", space);
}

Session session_from(const Json& json) {
  Session s;
  s.date = json.at("date").get<std::string>();
  for (const Json& c : json.at("candidates")) {
    s.candidates.push_back(
        {parse_schedule(c.at("schedule").get<std::string>()), c.at("predicted_s").get<double>(),
         c.at("seconds").get<std::vector<double>>(), c.at("rejected").get<bool>()});
  }
  return s;
}

}  // namespace

std::string session_path(const std::string& cache_path, const TuneKey& key,
                         const std::string& space) {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : search_text(key, space)) {
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
                     {"search", search_text(session.key, session.space)},
                     {"date", session.date},
                     {"candidates", candidates}};
  replace_text(path, file.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

std::optional<Session> load_session(const std::string& path, const TuneKey& key,
                                    const std::string& space, std::vector<std::string>& problems) {
  try {
    const auto text = read_text(path);
    if (!text) return std::nullopt;
    const Json json = Json::parse(*text);
    require(json.at("schema").get<std::string>() == kSchema, ErrorCode::kIo, "its schema is not ",
            kSchema);
    // Two searches may share a hash.
    if (json.at("search").get<std::string>() != search_text(key, space)) return std::nullopt;
    Session session = session_from(json);
    session.key = key;
    session.space = space;
    return session;
  } catch (const std::exception& e) {
    problems.push_back(cat(path, " is ignored: ", e.what()));
    return std::nullopt;
  }
}

void remove_session(const std::string& path) { std::remove(path.c_str()); }

}  // namespace uniep::tune
