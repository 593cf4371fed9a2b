#include "base/nearest.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace uniep {
namespace {

/// A longer text is no mistyped name, and the distance takes time with its square.
constexpr std::size_t kLongestName = 100;

/// How many letters have to be put in, left out, changed or swapped with the next.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, last, row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before = std::move(last);
    last = row;
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t changed = last[j - 1] + (a[i - 1] != b[j - 1]);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, changed});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

std::size_t most_changes(std::string_view mistyped) {
  return std::max<std::size_t>(1, mistyped.size() / 3);
}

}  // namespace

std::string nearest(std::string_view mistyped, std::span<const std::string> names) {
  if (mistyped.empty() || mistyped.size() > kLongestName) return "";
  std::string best;
  std::size_t least = most_changes(mistyped) + 1;
  for (const std::string& name : names) {
    const bool begun = mistyped.size() > 1 && name.starts_with(mistyped);
    const bool mixed = mistyped.size() > 3 && std::ranges::is_permutation(mistyped, name);
    const std::size_t changes = begun || mixed ? 1 : distance(mistyped, name);
    if (changes >= least) continue;
    least = changes;
    best = name;
  }
  return best;
}

std::string nearest_clause(std::string_view mistyped, std::span<const std::string> names) {
  const std::string name = nearest(mistyped, names);
  return name.empty() ? "" : name + " is the nearest; ";
}

}  // namespace uniep
