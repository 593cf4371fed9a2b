#pragma once

#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "bench/result_file.h"
#include "common/record_json.h"

namespace uniep::tool {

/// Below so many passes their spread says nothing.
inline constexpr int kFewestPasses = 3;

enum class Change { kFaster, kSlower, kNoise, kUnknown };
const char* name(Change change);

struct ComparedCase {
  ResultCase earlier, now;
  double ratio = 1;               ///< new time over old
  std::optional<double> noise{};  ///< by how much of it passes spread in both files together
  Change change = Change::kUnknown;
};

struct BenchComparison {
  std::string file;                      ///< the earlier one
  std::vector<std::string> differences;  ///< of circumstances, a sentence each
  std::vector<ComparedCase> cases;
  std::vector<ResultCase> only_earlier, only_now;

  std::size_t count(Change change) const;
  /// Cases that are slower beyond noise, and by more than so many percent.
  std::size_t slower_than(double percent) const;
};

/// Pairs the cases of both by shape, direction and schedule.
BenchComparison compare_results(const ResultFile& earlier, const ResultFile& now);

void print_comparison(std::ostream& out, const BenchComparison& comparison);
Json comparison_json(const BenchComparison& comparison);

}  // namespace uniep::tool
