#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

// What JSON files that people may have written hold, checked as it is read. Every failure is an
// Error(kIo) whose sentence names the key, the value and what would be accepted; where the file's
// name belongs, the caller puts it.

namespace uniep::tune {

using Json = nlohmann::ordered_json;

/// Refuses also what nests deeper than any file of uniep's, which could exhaust the stack later.
Json parse_json(std::string_view text);

/// Throws std::bad_alloc where memory would not hold what is parsed of a text. To be called before:
/// a Json that is destroyed while memory is exhausted ends the process, as its destructor
/// allocates.
void require_memory_for_json(std::string_view text);

/// A value as the file has it, cut where it is long.
std::string shown(const Json& json);

/// What a number may be, and how a sentence says so.
struct Accepted {
  bool (*holds)(double value);
  const char* text;
};

double number_from(const Json& json, const std::string& key, const Accepted& accepted);
const Json& list_from(const Json& json, const std::string& key);

/// An object of a file, whose keys are asked for one by one.
class Fields {
 public:
  /// `path` is that of the object; empty: the whole file.
  Fields(const Json& json, std::string path);

  std::string path(const std::string& key) const;

  const Json& at(const std::string& key);
  const Json& list(const std::string& key) { return list_from(at(key), path(key)); }
  double number(const std::string& key, const Accepted& accepted);
  double number_or(const std::string& key, const Accepted& accepted, double otherwise);
  std::string text(const std::string& key);
  std::string text_or(const std::string& key, const std::string& otherwise);
  bool flag(const std::string& key);
  Fields object(const std::string& key) { return {at(key), path(key)}; }

  template <class T>
  T integer(const std::string& key, T low, T high) {
    return static_cast<T>(wide_integer(key, low, high));
  }

  /// Refuses every key that nobody asked for.
  void refuse_others() const;

 private:
  std::int64_t wide_integer(const std::string& key, std::int64_t low, std::int64_t high);
  std::string known_keys() const;

  const Json& json_;
  std::string path_;
  std::vector<std::string> known_;
};

}  // namespace uniep::tune
