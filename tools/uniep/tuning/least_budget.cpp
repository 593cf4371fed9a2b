#include "tuning/least_budget.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "common/choices.h"
#include "common/table.h"
#include "common/work_limits.h"
#include "tune/book/cache.h"
#include "tune/search/session.h"

namespace uniep::tool {
namespace {

// Machines may be faster than the estimate, and a round takes longer: results are compared, and
// ahead of it a layer is made.
constexpr double kFastest = 0.5;
constexpr double kSlowest = 4;

// As long as measuring the machine takes, which is worth a look ahead of it.
constexpr double kShortBudget = 5;

/// Seconds of a round of the longer direction: two passes of each candidate.
double round_s(const TuneFlags& flags, const workload::ShapeSpec& spec, int ranks) {
  double pass_s = 0;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    if (!measures(pass_choice(flags.pass), pass)) continue;
    pass_s = std::max(pass_s, usual_pass_seconds(spec, ranks, pass));
  }
  // A space that was made small may have fewer points than that.
  const int candidates = flags.space.empty() ? flags.candidates : 1;
  return 2 * candidates * pass_s;
}

}  // namespace

void require_least_budget(const TuneFlags& flags, const workload::ShapeSpec& spec, int ranks) {
  if (flags.survey > 0) return;
  const bool resumed =
      !flags.fresh && !tune::session_files(tune::TuneCache::default_path()).empty();
  if (resumed) return;
  const double round = round_s(flags, spec, ranks);
  require(flags.budget >= kFastest * round, ErrorCode::kCapacity, "--budget ",
          formatted("%g", flags.budget), " is too small for ",
          counted(flags.candidates, "candidate", "candidates"),
          ": a round of measurements would take some ", formatted("%.0f", std::ceil(round)),
          " s; --budget ", formatted("%.0f", std::ceil(kSlowest * round)), " would do");
}

void require_budget_of_a_round(const TuneFlags& flags, const BenchCase& bench,
                               const tune::TuneSettings& settings, const Ranks& ranks) {
  if (flags.survey > 0 || flags.budget > kShortBudget || ranks.backend != Backend::kCpu) return;
  const Pass pass =
      measures(pass_choice(flags.pass), Pass::kForward) ? Pass::kForward : Pass::kBackward;
  const auto least = missing_budget_s(bench, pass, settings, ranks);
  require(!least, ErrorCode::kCapacity, too_small_text(flags, pass, least.value_or(0)));
}

}  // namespace uniep::tool
