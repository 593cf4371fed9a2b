#include "tune/search/session.h"

#include <cstdio>

#include "base/check.h"
#include "base/files.h"
#include "base/mixed_bits.h"
#include "base/quotes.h"
#include "tune/files/json_fields.h"
#include "tune/files/shared_files.h"

namespace uniep::tune {
namespace {

constexpr const char* kSuffix = ".session-";

constexpr const char* kSchema = "uniep-tune-session-1";

/// What a file must say to be of this search.
std::string search_text(const TuneKey& key, const std::string& identity) {
  return cat(to_string(key), ", ", key.driver, ", uniep ", key.library, ", ", identity);
}

constexpr Accepted kPrediction{[](double v) { return v >= 0; }, "a number from 0 is accepted"};
constexpr Accepted kMeasured{[](double v) { return v > 0; }, "a number above 0 is accepted"};

std::vector<double> seconds_from(const Json& list) {
  std::vector<double> seconds;
  for (const Json& s : list) {
    seconds.push_back(number_from(s, cat("seconds[", seconds.size(), "]"), kMeasured));
  }
  return seconds;
}

SessionCandidate candidate_from(const Json& json, const Refusal& refusal) {
  Fields fields(json, "");
  SessionCandidate c{parse_schedule(fields.text("schedule")),
                     fields.number("predicted_s", kPrediction),
                     seconds_from(fields.list("seconds")), fields.flag("rejected")};
  const auto refused = refusal(c.schedule);
  require(!refused, ErrorCode::kIo, "its schedule ", to_string(c.schedule),
          " cannot run: ", refused.value_or(""));
  return c;
}

Session session_from(Fields& fields, const Refusal& refusal) {
  Session s;
  s.date = fields.text("date");
  const Json& candidates = fields.list("candidates");
  require(!candidates.empty(), ErrorCode::kIo, "candidates is empty; 1 or more are accepted");
  for (const Json& c : candidates) s.candidates.push_back(candidate_from(c, refusal));
  return s;
}

}  // namespace

std::string session_path(const std::string& cache_path, const TuneKey& key,
                         const std::string& identity) {
  return cat(cache_path, kSuffix, std::hex, hash_of(search_text(key, identity)));
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
                     {"search", search_text(session.key, session.identity)},
                     {"date", session.date},
                     {"candidates", candidates}};
  replace_text(path, file.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

std::optional<Session> load_session(const std::string& path, const TuneKey& key,
                                    const std::string& identity, const Refusal& refusal,
                                    std::vector<std::string>& problems) {
  try {
    const auto text = read_text(path);
    if (!text) return std::nullopt;
    const Json json = parse_json(*text);
    Fields fields(json, "");
    const std::string schema = fields.text("schema");
    require(schema == kSchema, ErrorCode::kIo, "its schema is ", in_quotes(schema), "; ", kSchema,
            " is accepted");
    // Two searches may share a hash.
    if (fields.text("search") != search_text(key, identity)) return std::nullopt;
    Session session = session_from(fields, refusal);
    session.key = key;
    session.identity = identity;
    return session;
  } catch (const Error& e) {
    problems.push_back(cat(path, " is ignored: ", e.what()));
    return std::nullopt;
  }
}

std::vector<std::string> session_files(const std::string& cache_path) {
  return files_beside(cache_path, kSuffix);
}

StoredSession describe_session(const std::string& path) {
  StoredSession s;
  s.path = path;
  try {
    const Json json = parse_json(read_text(path).value_or(""));
    Fields fields(json, "");
    s.identity = fields.text("search");
    s.date = fields.text("date");
    for (const Json& candidate : fields.list("candidates")) {
      ++s.candidates;
      s.measured += Fields(candidate, "").list("seconds").size();
    }
  } catch (const Error& e) {
    s.problem = e.what();
  }
  return s;
}

void remove_session(const std::string& path) { std::remove(path.c_str()); }

}  // namespace uniep::tune
