#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace uniep::tool {

using Json = nlohmann::ordered_json;

/// What the records of all result files have in common; docs/results.md describes the keys.
struct Record {
  std::string shape;
  int ranks = 1;
  int hosts = 1;          ///< that these are on
  std::string direction;  ///< or a stage
  std::string schedule;
  std::vector<double> seconds;      ///< of each measured pass
  std::optional<double> floor_s{};  ///< what the time is compared with
  std::optional<std::int64_t> wrong{};

  /// Floor over median.
  std::optional<double> efficiency() const;
};

Json record_json(const Record& record);

/// Null for nothing.
template <class T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

/// Writes a result file; Error(kIo) where that fails.
void write_json(const std::string& path, const Json& file);

}  // namespace uniep::tool
