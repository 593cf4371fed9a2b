#include "tuning/tuner.h"

#include <chrono>

#include "base/check.h"
#include "base/mixed_bits.h"
#include "common/machine.h"
#include "common/table.h"
#include "tune/book/tune_key.h"
#include "tuning/tune_rank.h"

namespace uniep::tool {
namespace {

using Clock = std::chrono::steady_clock;

tune::TuneSubject subject_of(const BenchCase& bench, Pass pass, const tune::TuneSettings& settings,
                             Backend backend) {
  tune::TuneKey key =
      tune::tune_key(backend, bench.problem, layout_of_hosts(bench.ranks, bench.hosts),
                     bench.spec.tokens, bench.skew, pass);
  return {.problem = bench.problem,
          .key = key,
          .tokens_per_rank = bench.tokens_per_rank(),
          .topk_ids = bench.routing.topk_ids,
          .identity = search_for(bench, pass, settings, key.device)};
}

tune::Measure measured_by(TuneRank& rank) {
  return [&rank](const Schedule& schedule) { return rank.measure(schedule); };
}

}  // namespace

std::string search_text(const BenchCase& bench, const tune::TuneSettings& settings) {
  const std::string arithmetic = arithmetic_text(bench.problem);
  return cat(workload::to_string(bench.spec), arithmetic.empty() ? "" : ", ", arithmetic, "; ",
             counted(bench.ranks, "rank", "ranks"),
             bench.hosts == 1 ? "" : cat(" on ", bench.hosts, " hosts"), ", skew ",
             formatted("%.17g", bench.skew),
             bench.file.empty() ? cat(", seed ", bench.seed)
                                : cat(", routing ", hash_of(bench.routing.topk_ids)),
             settings.restriction.empty() ? "; in the whole space" : "; in the space ",
             settings.restriction, ", search seed ", settings.seed, ", ",
             counted(settings.candidates, "candidate", "candidates"),
             " (profile: ", settings.profile ? settings.profile->name : "none", "); by uniep ",
             to_string(this_build()));
}

std::string search_for(const BenchCase& bench, Pass pass, const tune::TuneSettings& settings,
                       const std::string& device) {
  return cat(kSearchFor, "the ", name(pass), " pass of ", search_text(bench, settings), "; on ",
             device);
}

std::optional<double> missing_budget_s(const BenchCase& bench, Pass pass,
                                       const tune::TuneSettings& settings, const Ranks& ranks) {
  tune::Tuner tuner(subject_of(bench, pass, settings, ranks.backend), settings);
  const Schedule baseline = parse_schedule("sequential", default_schedule(ranks.backend));
  std::optional<double> missing;
  ranks.run([&](Communicator& member, BenchDevice& device) {
    TuneRank rank(bench, pass, member, device, baseline);
    if (member.rank() != 0) return void(rank.follow());
    missing = tuner.missing_budget_s(measured_by(rank));
    rank.finish(false);
  });
  return missing;
}

tune::TuneOutcome tune_pass(const BenchCase& bench, Pass pass, const tune::TuneSettings& settings,
                            const Ranks& ranks) {
  tune::Tuner tuner(subject_of(bench, pass, settings, ranks.backend), settings);
  const Schedule baseline = parse_schedule("sequential", default_schedule(ranks.backend));
  tune::TuneOutcome elsewhere;  // of a process that does not lead
  double set_up_s = 0;
  ranks.run([&](Communicator& member, BenchDevice& device) {
    const auto begin = Clock::now();
    TuneRank rank(bench, pass, member, device, baseline);
    if (member.rank() != 0) {
      if (rank.follow() && !ranks.speaks) elsewhere.end = tune::TuneEnd::kInterrupted;
      return;
    }
    set_up_s = std::chrono::duration<double>(Clock::now() - begin).count();
    rank.finish(tuner.search(measured_by(rank)) == tune::TuneEnd::kInterrupted);
  });
  ranks.run([&](Communicator& member, BenchDevice& device) {
    Gatherer gatherer(device.bootstrap(member));
    const int rounds = gatherer.gather_one(tuner.explaining_rounds(set_up_s))[0];
    if (rounds == 0) return;
    TuneRank rank(bench, pass, member, device, baseline, device.runs_ahead());
    if (member.rank() != 0) return void(rank.follow());
    tuner.explain_best(measured_by(rank), rounds);
    rank.finish(false);
  });
  return ranks.speaks ? tuner.finish() : elsewhere;
}

}  // namespace uniep::tool
