#include "bench/bench_against.h"

#include <algorithm>
#include <cmath>
#include <ostream>

#include "base/check.h"
#include "base/files.h"
#include "bench/device_ranks.h"
#include "common/table.h"
#include "common/text_columns.h"

namespace uniep::tool {
namespace {

/// Half of the spread of a case's passes, in ms.
double half_spread(const ResultCase& c) { return (c.p90 - c.p10) / 2; }

bool is_same(const ResultCase& a, const ResultCase& b) {
  if (a.shape != b.shape || a.direction != b.direction || a.arithmetic != b.arithmetic) {
    return false;
  }
  // What "single" or "auto" stands for may have changed meanwhile.
  return a.schedule == b.schedule || (!a.given.empty() && a.given == b.given);
}

ComparedCase compare(const ResultCase& earlier, const ResultCase& now) {
  ComparedCase c{.earlier = earlier, .now = now, .ratio = now.ms / earlier.ms};
  if (std::min(earlier.passes, now.passes) < kFewestPasses) return c;
  c.noise = std::hypot(half_spread(earlier), half_spread(now)) / earlier.ms;
  const bool within = std::abs(c.ratio - 1) <= *c.noise;
  c.change = within ? Change::kNoise : c.ratio < 1 ? Change::kFaster : Change::kSlower;
  return c;
}

std::vector<std::string> differences(const ResultFile& earlier, const ResultFile& now) {
  std::vector<std::string> all;
  for (const auto& [key, value] : now.circumstances) {
    const auto before =
        std::ranges::find(earlier.circumstances, key, &std::pair<std::string, std::string>::first);
    if (before == earlier.circumstances.end() || before->second == value) continue;
    all.push_back(cat(key, ": ", before->second, " then, ", value, " now"));
  }
  return all;
}

void add_difference_of_ranks(BenchComparison& comparison) {
  for (const ComparedCase& c : comparison.cases) {
    const std::string then = ranks_text(c.earlier.ranks, c.earlier.hosts);
    const std::string now = ranks_text(c.now.ranks, c.now.hosts);
    if (then == now) continue;
    comparison.differences.push_back(cat("ranks: ", then, " then, ", now, " now"));
    return;
  }
}

const std::string& schedule_of(const ResultCase& c) {
  return c.given.empty() ? c.schedule : c.given;
}

std::string name_of(const ResultCase& c) {
  return cat(c.shape, ' ', c.direction, ' ', schedule_of(c),
             c.arithmetic == kPlain ? "" : cat(" (", c.arithmetic, ')'));
}

/// The first of them; --json has all, and schedules in full.
std::string joined(const std::vector<ResultCase>& cases) {
  constexpr std::size_t kMostNames = 12;
  constexpr std::size_t kLongestSchedule = 40;
  std::string text;
  for (std::size_t i = 0; i < std::min(cases.size(), kMostNames); ++i) {
    const ResultCase& c = cases[i];
    text += cat(i == 0 ? "" : "; ", c.shape, ' ', c.direction, ' ',
                cut_to_columns(schedule_of(c), kLongestSchedule));
  }
  if (cases.size() > kMostNames) text += cat("; and ", cases.size() - kMostNames, " more");
  return display_name(text);
}

Json names_json(const std::vector<ResultCase>& cases) {
  Json names = Json::array();
  for (const ResultCase& c : cases) names.push_back(name_of(c));
  return names;
}

std::string count_text(const BenchComparison& comparison) {
  std::string text;
  for (const Change change : {Change::kFaster, Change::kSlower, Change::kNoise, Change::kUnknown}) {
    const std::size_t count = comparison.count(change);
    const char* words = change == Change::kNoise     ? "within noise"
                        : change == Change::kUnknown ? "of too few passes to tell"
                                                     : name(change);
    if (count > 0) text += cat(text.empty() ? "" : ", ", count, ' ', words);
  }
  return text.empty() ? "no case is in both" : text;
}

Table case_table(const std::vector<ComparedCase>& cases) {
  using enum Table::Align;
  Table table({kLeft, kRight, kRight, kRight, kRight, kLeft, kLeft});
  table.header({"", "then", "now", "", "noise", "", ""});
  table.header({"pass", "(ms)", "(ms)", "ratio", "(%)", "change", "shape, schedule"});
  for (const ComparedCase& c : cases) {
    table.row({c.now.direction, milliseconds(1e-3 * c.earlier.ms), milliseconds(1e-3 * c.now.ms),
               formatted("%.3f", c.ratio), c.noise ? formatted("%.1f", 100 * *c.noise) : "-",
               name(c.change),
               cat(display_name(c.now.shape), ' ', schedule_of(c.now),
                   c.now.schedule == c.earlier.schedule ? "" : " (which stood for another one)")});
  }
  return table;
}

}  // namespace

const char* name(Change change) {
  switch (change) {
    case Change::kFaster:
      return "faster";
    case Change::kSlower:
      return "slower";
    case Change::kNoise:
      return "noise";
    case Change::kUnknown:
      break;
  }
  return "unknown";
}

std::size_t BenchComparison::count(Change change) const {
  return static_cast<std::size_t>(std::ranges::count(cases, change, &ComparedCase::change));
}

std::size_t BenchComparison::slower_than(double percent) const {
  return static_cast<std::size_t>(std::ranges::count_if(cases, [&](const ComparedCase& c) {
    return c.change == Change::kSlower && c.ratio > 1 + percent / 100;
  }));
}

BenchComparison compare_results(const ResultFile& earlier, const ResultFile& now) {
  BenchComparison comparison{.file = earlier.file,
                             .differences = differences(earlier, now),
                             .cases = {},
                             .only_earlier = earlier.results,
                             .only_now = {}};
  for (const ResultCase& of_now : now.results) {
    auto& left = comparison.only_earlier;
    const auto found =
        std::ranges::find_if(left, [&](const ResultCase& c) { return is_same(c, of_now); });
    if (found == left.end()) {
      comparison.only_now.push_back(of_now);
      continue;
    }
    comparison.cases.push_back(compare(*found, of_now));
    left.erase(found);
  }
  add_difference_of_ranks(comparison);
  return comparison;
}

void print_comparison(std::ostream& out, const BenchComparison& comparison) {
  Notes notes;
  notes.add("against", display_name(comparison.file));
  for (const std::string& difference : comparison.differences)
    notes.add("WARNING", display_name(difference));
  if (!comparison.only_earlier.empty()) notes.add("only then", joined(comparison.only_earlier));
  if (!comparison.only_now.empty()) notes.add("only now", joined(comparison.only_now));
  out << "#\n" << notes;
  if (!comparison.cases.empty()) out << case_table(comparison.cases);
  out << comment("against the earlier file: " + count_text(comparison));
}

Json comparison_json(const BenchComparison& comparison) {
  Json cases = Json::array();
  for (const ComparedCase& c : comparison.cases) {
    cases.push_back({{"shape", c.now.shape},
                     {"direction", c.now.direction},
                     {"given", c.now.given},
                     {"schedule", c.now.schedule},
                     {"earlier_ms", c.earlier.ms},
                     {"ms", c.now.ms},
                     {"ratio", c.ratio},
                     {"noise", or_null(c.noise)},
                     {"change", name(c.change)}});
  }
  return {{"file", comparison.file},
          {"differences", comparison.differences},
          {"cases", cases},
          {"only_earlier", names_json(comparison.only_earlier)},
          {"only_now", names_json(comparison.only_now)}};
}

}  // namespace uniep::tool
