#include "bench/bench_run.h"

#include <iostream>
#include <optional>

#include "base/check.h"
#include "base/files.h"
#include "common/progress.h"

namespace uniep::tool {
namespace {

/// Work that a pass is, for telling how much is left.
std::int64_t weight_of(const BenchCase& bench, Pass pass) {
  double flops = 0;
  for (const Product& p : products(bench.spec, pass, bench.rows())) flops += p.flops();
  return 1 + static_cast<std::int64_t>(1e-6 * flops);
}

std::int64_t weight_of(const std::vector<BenchCase>& cases, const BenchOptions& options) {
  std::int64_t weight = 0;
  for (const BenchCase& bench : cases) {
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      if (measures(options.passes, pass)) weight += weight_of(bench, pass);
    }
  }
  return weight * options.passes_of_a_direction() *
         static_cast<std::int64_t>(options.schedules.size());
}

}  // namespace

std::vector<BenchEntry> measure_cases(const std::vector<BenchCase>& cases, BenchOptions options,
                                      const Ranks& ranks) {
  std::optional<Progress> progress;
  if (ranks.speaks) progress.emplace("measuring", weight_of(cases, options));
  std::vector<BenchEntry> entries;
  for (const BenchCase& bench : cases) {
    if (progress) {
      progress->set_label("measuring " + display_name(bench.name));
      options.passed = [&](Pass pass) { progress->advance(weight_of(bench, pass)); };
    }
    BenchEntry& entry = entries.emplace_back(BenchEntry{.bench = bench, .report = {}});
    ranks.run([&](Communicator& member, BenchDevice& device) {
      BenchReport report = run_bench(entry.bench, options, member, device);
      if (member.rank() == 0 || !ranks.speaks) entry.report = std::move(report);
    });
    if (progress) {
      const Progress::Pause pause(*progress);
      print_bench(std::cout, entry, options);
    }
    if (entry.report.interrupted) break;
  }
  return entries;
}

bool was_interrupted(const std::vector<BenchEntry>& entries) {
  return !entries.empty() && entries.back().report.interrupted;
}

std::string interrupted_text(const std::vector<BenchEntry>& entries, std::size_t cases,
                             const BenchOptions& options) {
  std::size_t passes = 0;
  for (const BenchEntry& entry : entries) {
    for (const auto& schedule : entry.report.schedules) {
      for (const BenchPass& pass : schedule) passes += pass.passes();
    }
  }
  const std::size_t directions = options.passes == PassChoice::kBoth ? 2 : 1;
  const std::size_t wanted =
      cases * options.schedules.size() * directions * static_cast<std::size_t>(options.iterations);
  const std::size_t left = cases - entries.size();
  return cat("interrupted after ", passes, " of ", wanted, " measured passes",
             left == 0 ? "" : cat("; ", left, " of ", cases, " layers not begun"));
}

}  // namespace uniep::tool
