#include "tune/cache.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/env.h"
#include "schedule/axes.h"
#include "tune/files.h"

namespace uniep::tune {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* kSchema = "uniep-tuned-1";

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

TunedEntry entry_from(const Json& json) {
  TunedEntry e;
  e.key.backend = one_of(json, "backend", Backend::kCpu, Backend::kCuda);
  e.key.device = json.at("device").get<std::string>();
  e.key.driver = json.at("driver").get<std::string>();
  e.key.library = json.at("library").get<std::string>();
  e.key.hidden = json.at("hidden").get<std::int64_t>();
  e.key.intermediate = json.at("intermediate").get<std::int64_t>();
  e.key.num_experts = json.at("experts").get<int>();
  e.key.topk = json.at("topk").get<int>();
  e.key.ranks = json.at("ranks").get<int>();
  e.key.pass = one_of(json, "pass", Pass::kForward, Pass::kBackward);
  e.key.tokens = json.at("tokens").get<std::int64_t>();
  e.key.skew = json.at("skew").get<double>();
  e.schedule = schedule_from(json.at("schedule"));
  e.ms = json.at("ms").get<double>();
  e.default_ms = json.at("default_ms").get<double>();
  e.date = json.at("date").get<std::string>();
  return e;
}

void parse_entries(const Json& file, const std::string& origin, TunedEntries& all) {
  std::size_t number = 0;
  for (const Json& json : file.at("entries")) {
    try {
      all.entries.push_back(entry_from(json));
    } catch (const std::exception& e) {
      all.problems.push_back(cat(origin, ": entry ", number, " is ignored: ", e.what()));
    }
    ++number;
  }
}

/// Whether nothing of a file could be understood.
bool is_foreign(const TunedEntries& loaded) {
  return loaded.entries.empty() && !loaded.problems.empty();
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
  try {
    const Json file = Json::parse(text);
    const auto schema = file.at("schema").get<std::string>();
    require(schema == kSchema, ErrorCode::kIo, "its schema is '", schema, "'; ", kSchema,
            " is accepted");
    parse_entries(file, origin, all);
  } catch (const std::exception& e) {
    all.problems.push_back(cat(origin, " is ignored: ", e.what()));
  }
  return all;
}

std::string tuned_to_json(const std::vector<TunedEntry>& entries) {
  Json list = Json::array();
  for (const TunedEntry& e : entries) list.push_back(entry_json(e));
  const Json file = {{"schema", kSchema}, {"entries", list}};
  return file.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
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

std::vector<std::string> TuneCache::store(const TunedEntry& entry) const {
  const FileLock lock(path_ + ".lock");
  TunedEntries loaded = load();
  if (is_foreign(loaded)) {
    const std::string aside = path_ + ".damaged";
    std::rename(path_.c_str(), aside.c_str());
    loaded.problems.push_back(cat("it was moved to ", aside));
  }
  const auto old =
      std::ranges::find(loaded.entries, entry.key, [](const TunedEntry& e) { return e.key; });
  if (old != loaded.entries.end()) {
    *old = entry;
  } else {
    loaded.entries.push_back(entry);
  }
  replace_text(path_, tuned_to_json(loaded.entries));
  return loaded.problems;
}

}  // namespace uniep::tune
