#include "tune/files/json_fields.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "base/check.h"

namespace uniep::tune {
namespace {

// Twice what any file of uniep's needs.
constexpr int kMostNested = 16;

bool require_shallow(int depth, Json::parse_event_t, Json&) {
  require(depth <= kMostNested, ErrorCode::kIo, "it nests more than ", kMostNested,
          " objects and lists; at most so many are accepted");
  return true;
}

/// Nothing for what is no integer, and for one that int64_t does not hold.
std::optional<std::int64_t> integer_from(const Json& json) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  const bool too_large = json.is_number_unsigned() && json.get<std::uint64_t>() > kMost;
  if (!json.is_number_integer() || too_large) return std::nullopt;
  return json.get<std::int64_t>();
}

}  // namespace

void require_memory_for_json(std::string_view text) {
  // The worst are lists in lists, three characters each, which take 16 bytes and an allocation.
  constexpr std::size_t kBytesPerCharacter = 32;
  constexpr std::size_t kSmallest = 65536;
  operator delete(operator new(kSmallest + kBytesPerCharacter * text.size()));
}

Json parse_json(std::string_view text) {
  require_memory_for_json(text);
  try {
    return Json::parse(text, require_shallow);
  } catch (const Json::parse_error& e) {
    throw Error(ErrorCode::kIo,
                cat("it is no JSON at byte ", e.byte, "; one JSON object is accepted"));
  } catch (const Json::exception&) {
    throw Error(ErrorCode::kIo, "it has a number that no double holds; finite ones are accepted");
  }
}

std::string shown(const Json& json) {
  constexpr std::size_t kMostShown = 64;
  if (json.is_structured()) return cat("an ", json.type_name());
  // Cutting a character in two would leave what is not UTF-8.
  const std::string text = json.dump(-1, ' ', true);
  return text.size() <= kMostShown ? text : text.substr(0, kMostShown) + "...";
}

double number_from(const Json& json, const std::string& key, const Accepted& accepted) {
  require(json.is_number() && accepted.holds(json.get<double>()), ErrorCode::kIo, key, " is ",
          shown(json), "; ", accepted.text);
  return json.get<double>();
}

const Json& list_from(const Json& json, const std::string& key) {
  require(json.is_array(), ErrorCode::kIo, key, " is ", shown(json), "; a list is accepted");
  return json;
}

Fields::Fields(const Json& json, std::string path) : json_(json), path_(std::move(path)) {
  require(json.is_object(), ErrorCode::kIo, path_.empty() ? "it" : path_, " is ", shown(json),
          "; an object is accepted");
}

std::string Fields::path(const std::string& key) const {
  return path_.empty() ? key : cat(path_, '.', key);
}

const Json& Fields::at(const std::string& key) {
  known_.push_back(key);
  const auto found = json_.find(key);
  require(found != json_.end(), ErrorCode::kIo, "there is no key ", path(key), "; it is required");
  return *found;
}

double Fields::number(const std::string& key, const Accepted& accepted) {
  return number_from(at(key), path(key), accepted);
}

double Fields::number_or(const std::string& key, const Accepted& accepted, double otherwise) {
  if (json_.contains(key)) return number(key, accepted);
  known_.push_back(key);
  return otherwise;
}

std::string Fields::text(const std::string& key) {
  const Json& json = at(key);
  require(json.is_string(), ErrorCode::kIo, path(key), " is ", shown(json), "; a text is accepted");
  return json.get<std::string>();
}

std::string Fields::text_or(const std::string& key, const std::string& otherwise) {
  if (json_.contains(key)) return text(key);
  known_.push_back(key);
  return otherwise;
}

bool Fields::flag(const std::string& key) {
  const Json& json = at(key);
  require(json.is_boolean(), ErrorCode::kIo, path(key), " is ", shown(json),
          "; true or false is accepted");
  return json.get<bool>();
}

std::int64_t Fields::wide_integer(const std::string& key, std::int64_t low, std::int64_t high) {
  const Json& json = at(key);
  const auto value = integer_from(json);
  require(value && *value >= low && *value <= high, ErrorCode::kIo, path(key), " is ", shown(json),
          "; an integer from ", low, " to ", high, " is accepted");
  return *value;
}

void Fields::refuse_others() const {
  for (const auto& item : json_.items()) {
    const bool known = std::ranges::find(known_, item.key()) != known_.end();
    require(known, ErrorCode::kIo, "key ", path(item.key()), " is unknown; ", known_keys(),
            " are accepted");
  }
}

std::string Fields::known_keys() const {
  std::string keys;
  for (const std::string& key : known_) keys += cat(keys.empty() ? "" : ", ", key);
  return keys;
}

}  // namespace uniep::tune
