#include "tune/cache.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/env.h"
#include "base/files.h"
#include "schedule/axes.h"
#include "tune/shared_files.h"

namespace uniep::tune {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* kSchema = "uniep-tuned-1";
constexpr const char* kEmptyFile = R"({"schema": "uniep-tuned-1", "entries": []})";

Json axes_json(const Schedule& schedule) {
  Json json = Json::object();
  for (const Axis& axis : axes()) {
    json[std::string(axis.info.name)] = axis_value_text(axis.info, axis.get(schedule));
  }
  return json;
}

/// Every axis must be there and no other: an entry of another version of the space is not guessed.
Schedule schedule_from(const Json& json) {
  require(json.size() == axes().size(), ErrorCode::kIo, "it has ", json.size(), " axes; ",
          axes().size(), " are accepted");
  Schedule schedule;
  for (std::size_t i = 0; i < axes().size(); ++i) {
    const AxisInfo& info = axes()[i].info;
    const auto text = json.at(std::string(info.name)).get<std::string>();
    set_axis(schedule, i, parse_axis_value(info, text));
  }
  return schedule;
}

Json entry_json(const TunedEntry& e) {
  return {{"backend", name(e.key.backend)},
          {"device", e.key.device},
          {"driver", e.key.driver},
          {"library", e.key.library},
          {"hidden", e.key.hidden},
          {"intermediate", e.key.intermediate},
          {"experts", e.key.num_experts},
          {"topk", e.key.topk},
          {"ranks", e.key.ranks},
          {"pass", name(e.key.pass)},
          {"tokens", e.key.tokens},
          {"skew", e.key.skew},
          {"schedule", axes_json(e.schedule)},
          {"ms", e.ms},
          {"default_ms", e.default_ms},
          {"date", e.date}};
}

template <class T>
T one_of(const Json& json, const char* key, T a, T b) {
  const auto text = json.at(key).get<std::string>();
  require(text == name(a) || text == name(b), ErrorCode::kIo, key, " is '", text, "'");
  return text == name(a) ? a : b;
}

/// An integer from `least` on; nlohmann's own conversion drops fractions and high bits.
template <class T>
T integer_at(const Json& json, const char* key, T least) {
  constexpr T kMost = std::numeric_limits<T>::max();
  const Json& value = json.at(key);
  // Above the range of int64_t it is less than 0 here, and refused for that.
  const std::int64_t n = value.is_number_integer() ? value.get<std::int64_t>() : -1;
  require(n >= least && n <= kMost, ErrorCode::kIo, key, " is ", value.dump(), "; an integer from ",
          least, " to ", kMost, " is accepted");
  return static_cast<T>(n);
}

TunedEntry entry_from(const Json& json) {
  TunedEntry e;
  e.key.backend = one_of(json, "backend", Backend::kCpu, Backend::kCuda);
  e.key.device = json.at("device").get<std::string>();
  e.key.driver = json.at("driver").get<std::string>();
  e.key.library = json.at("library").get<std::string>();
  e.key.hidden = integer_at<std::int64_t>(json, "hidden", 1);
  e.key.intermediate = integer_at<std::int64_t>(json, "intermediate", 1);
  e.key.num_experts = integer_at<int>(json, "experts", 1);
  e.key.topk = integer_at<int>(json, "topk", 1);
  e.key.ranks = integer_at<int>(json, "ranks", 1);
  e.key.pass = one_of(json, "pass", Pass::kForward, Pass::kBackward);
  e.key.tokens = integer_at<std::int64_t>(json, "tokens", 0);
  e.key.skew = json.at("skew").get<double>();
  e.schedule = schedule_from(json.at("schedule"));
  e.ms = json.at("ms").get<double>();
  e.default_ms = json.at("default_ms").get<double>();
  e.date = json.at("date").get<std::string>();
  return e;
}

/// A file of this schema; throws where it is anything else.
Json file_from(std::string_view text) {
  Json file = Json::parse(text);
  const auto schema = file.at("schema").get<std::string>();
  require(schema == kSchema, ErrorCode::kIo, "its schema is '", schema, "'; ", kSchema,
          " is accepted");
  const Json& entries = file.at("entries");
  require(entries.is_array(), ErrorCode::kIo, "its entries are of type ", entries.type_name(),
          "; an array is accepted");
  return file;
}

/// A file as it is, where that is one of this schema; else an empty one, and the reason.
Json file_or_empty(std::string_view text, const std::string& origin,
                   std::vector<std::string>& problems) {
  try {
    return file_from(text);
  } catch (const std::exception& e) {
    problems.push_back(cat(origin, " is ignored: ", e.what()));
    return Json::parse(kEmptyFile);
  }
}

/// The entry; nothing, and the reason, where it is not understood.
std::optional<TunedEntry> entry_or_problem(const Json& entries, std::size_t number,
                                           const std::string& origin,
                                           std::vector<std::string>& problems) {
  try {
    return entry_from(entries[number]);
  } catch (const std::exception& e) {
    problems.push_back(cat(origin, ": entry ", number, " is ignored: ", e.what()));
    return std::nullopt;
  }
}

/// In the place of the one that has its key, else behind all others.
void put_entry(Json& entries, const TunedEntry& entry) {
  std::vector<std::string> ignored;  // what is not understood stays, and is said where it is used
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto old = entry_or_problem(entries, i, "", ignored);
    if (old && old->key == entry.key) {
      entries[i] = entry_json(entry);
      return;
    }
  }
  entries.push_back(entry_json(entry));
}

bool same_situation(TuneKey a, const TuneKey& b) {
  a.skew = b.skew;
  return a == b;
}

}  // namespace

std::string to_string(const TuneKey& k) {
  return cat(name(k.pass), " of hidden=", k.hidden, ",intermediate=", k.intermediate,
             ",experts=", k.num_experts, ",topk=", k.topk, " with up to ", k.tokens,
             " tokens on each of ", k.ranks, " ranks, skew ", k.skew, ", on ", k.device);
}

TunedEntries parse_tuned(std::string_view text, const std::string& origin) {
  TunedEntries all;
  const Json file = file_or_empty(text, origin, all.problems);
  const Json& entries = file.at("entries");
  for (std::size_t i = 0; i < entries.size(); ++i) {
    auto entry = entry_or_problem(entries, i, origin, all.problems);
    if (entry) all.entries.push_back(std::move(*entry));
  }
  return all;
}

const TunedEntry* find_entry(const std::vector<TunedEntry>& entries, const TuneKey& key) {
  const TunedEntry* nearest = nullptr;
  for (const TunedEntry& e : entries) {
    if (!same_situation(e.key, key)) continue;
    const auto distance = [&](const TunedEntry& to) { return std::abs(to.key.skew - key.skew); };
    if (nearest == nullptr || distance(e) < distance(*nearest)) nearest = &e;
  }
  return nearest;
}

std::string TuneCache::default_path() { return env_tune_cache(); }

TunedEntries TuneCache::load() const {
  try {
    const auto text = read_text(path_);
    return text ? parse_tuned(*text, path_) : TunedEntries{};
  } catch (const Error& e) {
    return {{}, {e.what()}};
  }
}

void TuneCache::require_storable() const {
  const FileLock lock(path_ + ".lock");
  require_replaceable(path_);
}

std::vector<std::string> TuneCache::store(const TunedEntry& entry) const {
  const FileLock lock(path_ + ".lock");
  std::vector<std::string> problems;
  const auto text = read_text(path_);
  Json file = file_or_empty(text ? *text : kEmptyFile, path_, problems);
  if (!problems.empty()) problems.push_back(cat("it was moved to ", move_aside(path_)));
  put_entry(file.at("entries"), entry);
  replace_text(path_, file.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
  return problems;
}

}  // namespace uniep::tune
