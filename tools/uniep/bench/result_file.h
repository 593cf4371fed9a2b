#pragma once

#include <string>
#include <utility>
#include <vector>

#include "common/record_json.h"

namespace uniep::tool {

/// A direction of a layer under a schedule, as a result file has it.
inline constexpr const char* kPlain = "swiglu";  ///< arithmetic of a record that names none

struct ResultCase {
  std::string shape;
  std::string direction;
  std::string given;     ///< the schedule as --schedule had it; empty: the file does not say
  std::string schedule;  ///< in full
  std::string arithmetic = kPlain;  ///< arithmetic_words
  int ranks = 1;
  int hosts = 1;   ///< that these were on; of a file that does not say, one
  int passes = 0;  ///< that were measured
  double ms = 0, p10 = 0, p90 = 0;
};

/// What a file of `uniep bench --json` says, or one that is about to be written.
struct ResultFile {
  std::string file;
  /// What figures depend on, and what it was: "machine", "version", ...
  std::vector<std::pair<std::string, std::string>> circumstances;
  std::vector<ResultCase> results;
};

/// Reads schema "uniep-bench-1". Error(kIo) says what is wrong with a file that it cannot use.
ResultFile read_result_file(const std::string& path);

/// Throws as above, without the file's name.
ResultFile result_file_of(const Json& json, const std::string& file);

}  // namespace uniep::tool
