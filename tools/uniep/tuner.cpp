#include "tuner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <memory>
#include <utility>

#include "base/check.h"
#include "base/quantile.h"
#include "interrupt.h"
#include "machine.h"
#include "table.h"
#include "tune/cost_model.h"
#include "tune/model_search.h"
#include "tune/parallel.h"
#include "tune/starting_points.h"
#include "tune/tune_key.h"
#include "tune_rank.h"

namespace uniep::tool {
namespace {

using Clock = std::chrono::steady_clock;

/// Part of the budget by which a search may exceed it, to explain what it found.
constexpr double kExcess = 0.2;
constexpr std::chrono::seconds kBetweenLines(1);  // and between saved sessions
constexpr std::size_t kExplained = 5;
constexpr int kExplainingRuns = 9;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// What the model thinks of the space, fastest first; nothing without a profile.
class Model {
 public:
  Model(const BenchCase& bench, Pass pass, const tune::MachineProfile& profile)
      : pass_(pass), profile_(profile) {
    const std::vector<std::int64_t> tokens(static_cast<std::size_t>(bench.ranks),
                                           bench.spec.tokens);
    plans_ = tune::plans_to_simulate(bench.problem, tokens, bench.routing.topk_ids);
  }
  double operator()(const Schedule& s) const {
    return tune::simulate(plans_, pass_, s, profile_).seconds;
  }

 private:
  Pass pass_;
  const tune::MachineProfile& profile_;
  std::vector<RoutingPlan> plans_;
};

std::vector<tune::Ranked> rank_by_model(const Space& space, const Model& model,
                                        const std::vector<Schedule>& known, double seconds,
                                        const TuneSettings& settings) {
  const auto start = Clock::now();
  const std::size_t threads = tune::model_threads();
  tune::for_each_in_parallel(threads, [&](std::size_t) { model(known.front()); });
  const double each = std::max(1e-6, seconds_since(start) / static_cast<double>(threads));
  // Never so long that other ranks would give up waiting.
  constexpr double kMostSeconds = 20;
  constexpr double kFewest = 12, kMost = 2000;
  const double affordable = std::min(seconds, kMostSeconds) / each;
  if (affordable < kFewest) return {};
  const int evaluations = static_cast<int>(std::min(affordable, kMost));
  return tune::search_model(
      space, known, model,
      {.samples = evaluations / 3, .climbs = 4, .evaluations = evaluations, .seed = settings.seed});
}

/// What is measured: what is known beforehand, and what the model, or chance, proposes.
std::vector<tune::SessionCandidate> candidates_of(const Space& space,
                                                  const std::vector<Schedule>& known,
                                                  const std::vector<tune::Ranked>& by_model,
                                                  const TuneSettings& settings) {
  std::vector<tune::SessionCandidate> all;
  const auto add = [&](const Schedule& s) {
    for (const auto& c : all) {
      if (c.schedule == s) return false;
    }
    const auto predicted = std::ranges::find(by_model, s, &tune::Ranked::schedule);
    const double seconds = predicted == by_model.end() ? 0 : predicted->seconds;
    all.push_back({.schedule = s, .predicted_s = seconds, .seconds = {}, .rejected = false});
    return true;
  };
  for (const Schedule& s : known) add(s);
  for (const tune::Ranked& r : tune::distinct(by_model, settings.candidates)) add(r.schedule);
  Space::Rng rng(settings.seed);
  std::size_t added = 0;
  for (int tries = 0; by_model.empty() && added < settings.candidates && tries < 1000; ++tries) {
    added += add(space.sample(rng)) ? 1 : 0;
  }
  return all;
}

/// A search under way on the rank that leads it.
class Search {
 public:
  /// `differing`: elements with wrong bits in the passes of the first candidate so far.
  Search(tune::Session session, std::string path, const TuneSettings& settings,
         Clock::time_point start, std::int64_t differing)
      : session_(std::move(session)),
        path_(std::move(path)),
        settings_(settings),
        start_(start),
        differing_before_(differing),
        race_(session_.candidates.size(),
              {.keep_reference = true, .max_rounds = settings.max_rounds, .seed = settings.seed}) {
    replay();
  }

  /// Until it is decided, or `budget_s` after the start.
  void run(TuneRank& rank);
  TuneOutcome outcome() const;

 private:
  /// Puts the measurements of an earlier session where they were made: the order of a race follows
  /// from its seed and what was recorded.
  void replay();
  void measure(TuneRank& rank, std::size_t candidate);
  void report_round();
  void save();

  tune::Session session_;
  const std::string path_;
  const TuneSettings& settings_;
  const Clock::time_point start_;
  std::int64_t differing_before_;
  tune::Race race_;
  std::size_t resumed_ = 0;
  std::size_t measurements_ = 0;
  TuneEnd end_ = TuneEnd::kDecided;
  std::string save_problem_;
  Clock::time_point saved_ = Clock::now();
  std::optional<Clock::time_point> reported_;
};

void Search::replay() {
  std::vector<std::size_t> used(session_.candidates.size(), 0);
  while (const auto c = race_.next()) {
    const tune::SessionCandidate& stored = session_.candidates[*c];
    if (used[*c] < stored.seconds.size()) {
      race_.record(*c, stored.seconds[used[*c]++]);
      ++resumed_;
    } else if (stored.rejected) {
      race_.reject(*c);
    } else {
      break;
    }
  }
}

void Search::run(TuneRank& rank) {
  int rounds = race_.rounds();
  while (const auto candidate = race_.next()) {
    if (Interrupt::requested()) {
      end_ = TuneEnd::kInterrupted;
      break;
    }
    if (seconds_since(start_) > settings_.budget_s) {
      end_ = TuneEnd::kBudget;
      break;
    }
    measure(rank, *candidate);
    if (Clock::now() - saved_ >= kBetweenLines) save();
    if (race_.rounds() == rounds) continue;
    rounds = race_.rounds();
    report_round();
  }
  if (end_ == TuneEnd::kDecided && !race_.decided()) end_ = TuneEnd::kRounds;
  save();
}

void Search::measure(TuneRank& rank, std::size_t candidate) {
  tune::SessionCandidate& c = session_.candidates[candidate];
  // A schedule's first pass pays for memory that it is the first to touch.
  std::int64_t at_first = 0;
  if (candidate == 0) {
    at_first = std::exchange(differing_before_, 0);
  } else if (c.seconds.empty()) {
    at_first = rank.measure(c.schedule).differing;
  }
  const TuneRank::Measurement m = rank.measure(c.schedule);
  ++measurements_;
  if (at_first + m.differing > 0) {
    c.rejected = true;
    race_.reject(candidate);
    return;
  }
  c.seconds.push_back(m.seconds);
  race_.record(candidate, m.seconds);
}

void Search::report_round() {
  const std::vector<std::size_t> ranking = race_.ranking();
  if (ranking.empty() || (reported_ && Clock::now() - *reported_ < kBetweenLines)) return;
  reported_ = Clock::now();
  const std::size_t best = ranking.front();
  std::cout << "# " << name(session_.key.pass) << " round " << race_.rounds() << ", "
            << formatted("%.1f", seconds_since(start_)) << " s: " << race_.running() << " of "
            << session_.candidates.size() << " left, the best takes "
            << milliseconds(race_.median(best)) << " ms, the default "
            << formatted("%.3f", race_.speedup(best)) << " times as long" << std::endl;
}

void Search::save() {
  session_.date = utc_now();
  saved_ = Clock::now();
  try {
    tune::save_session(path_, session_);
  } catch (const Error& e) {  // a search that cannot be resumed is still one
    save_problem_ = e.what();
  }
}

TuneOutcome Search::outcome() const {
  TuneOutcome out;
  out.key = session_.key;
  out.resumed = resumed_;
  out.measurements = measurements_;
  out.rounds = race_.rounds();
  out.conclusive = race_.decided() || race_.rounds() >= race_.rounds_to_tell();
  out.end = end_;
  out.default_s = race_.median(0);
  if (!save_problem_.empty()) out.problems.push_back(save_problem_);
  for (const std::size_t i : race_.ranking()) {
    const tune::SessionCandidate& c = session_.candidates[i];
    out.ranking.push_back({.schedule = c.schedule,
                           .predicted_s = c.predicted_s,
                           .seconds = c.seconds,
                           .speedup = race_.speedup(i),
                           .faster = race_.is_faster(i)});
    if (out.ranking.size() == 1) out.chosen = out.ranking.front();
    // Where chance may have put another in front, the default stays.
    if (i == 0 && !out.chosen->faster) {
      out.chosen = out.ranking.back();
      out.kept_default = true;
    }
  }
  for (const tune::SessionCandidate& c : session_.candidates) {
    if (!c.rejected) continue;
    out.rejected.push_back({.schedule = c.schedule,
                            .predicted_s = c.predicted_s,
                            .seconds = c.seconds,
                            .rejected = true});
  }
  return out;
}

/// Runs the best candidates and the default `rounds` more times, in turns, with the timeline where
/// figures of stages come from that, and says what sets them apart.
void explain_best(TuneRank& rank, const Schedule& base, int rounds, TuneOutcome& out) {
  const std::size_t count = std::min(kExplained, out.ranking.size());
  std::vector<std::vector<tune::Breakdown>> runs(count + 1);
  for (int i = 0; i < rounds; ++i) {
    for (std::size_t c = 0; c <= count; ++c) {
      const Schedule& s = c == count ? base : out.ranking[c].schedule;
      runs[c].push_back(tune::breakdown_of(rank.measure(s).by_rank));
    }
  }
  const tune::Breakdown of_default = tune::median_of(runs[count]);
  for (std::size_t c = 0; c < count; ++c) {
    out.ranking[c].why = out.ranking[c].schedule == base
                             ? "the default"
                             : tune::explain(tune::median_of(runs[c]), of_default);
  }
}

/// Where too few rounds could tell nothing apart, the default was kept for that alone, and must not
/// take the place of what a longer search found.
void store_best(TuneOutcome& out, const TuneSettings& settings) {
  if (!out.chosen || !out.conclusive) return;
  const TunedCandidate& best = *out.chosen;
  const tune::TunedEntry entry{.key = out.key,
                               .schedule = best.schedule,
                               .ms = 1e3 * median(best.seconds),
                               .default_ms = 1e3 * out.default_s,
                               .date = utc_now()};
  try {
    for (std::string& p : tune::TuneCache(settings.cache).store(entry)) {
      out.problems.push_back(std::move(p));
    }
    out.stored = true;
  } catch (const Error& e) {  // what was found is still printed
    out.store_failed = true;
    out.problems.push_back(cat("what was found is not stored: ", e.what()));
  }
}

bool is_finished(const TuneOutcome& out) {
  return out.end == TuneEnd::kDecided || out.end == TuneEnd::kRounds;
}

/// What the search of a direction knows before it measures.
struct Ground {
  const BenchCase& bench;
  Pass pass;
  const TuneSettings& settings;
  Clock::time_point start;
  Place place;
  Space space;
  tune::TuneKey key;
  std::string search, path;
  std::vector<Schedule> known{};
  std::optional<tune::Session> session{};  ///< an earlier one, to be gone on with
  std::size_t modelled = 0;
  std::vector<std::string> problems{};

  Ground(const BenchCase& of, Pass direction, const TuneSettings& how, Backend backend)
      : bench(of),
        pass(direction),
        settings(how),
        start(Clock::now()),
        place(tune::this_place(backend)),
        space(of.problem, direction, place),
        key(tune::tune_key(backend, of.problem, of.ranks, of.spec.tokens, of.skew, direction)),
        search(search_text(of, how)),
        path(tune::session_path(how.cache, key, search)) {
    space.restrict_to(settings.restriction);
    const auto invalid = [&](const Schedule& s) { return invalid_reason(s, bench.problem, place); };
    if (settings.resume) session = tune::load_session(path, key, search, invalid, problems);
    if (session) return;
    known = tune::starting_points(space, bench.problem, key, place,
                                  settings.profile ? &*settings.profile : nullptr);
  }

  double spent() const { return seconds_since(start); }

  const Schedule& base() const {
    return session ? session->candidates.front().schedule : known.front();
  }

  /// Measurements that a first round still takes, each of two passes.
  std::size_t left_of_a_round() const {
    if (!session) return known.size() + settings.candidates;
    return static_cast<std::size_t>(std::ranges::count_if(
        session->candidates, [](const auto& c) { return c.seconds.empty() && !c.rejected; }));
  }

  /// With candidates by a model that takes at most a quarter of what is left beside a round.
  tune::Session begin(double round_s) {
    if (session) return std::move(*session);
    std::vector<tune::Ranked> by_model;
    if (settings.profile) {
      const double seconds = (settings.budget_s - spent() - round_s) / 4;
      by_model =
          rank_by_model(space, Model(bench, pass, *settings.profile), known, seconds, settings);
      modelled = by_model.size();
    }
    return {key, search, utc_now(), candidates_of(space, known, by_model, settings)};
  }
};

/// Searches on rank 0, once the layer is there. `out.least_budget_s` is set where there is no time
/// for a round.
void lead(Ground& ground, TuneRank& rank, TuneOutcome& out) {
  std::int64_t differing = rank.measure(ground.base()).differing;  // touches memory first
  const double before = ground.spent();
  differing += rank.measure(ground.base()).differing;
  const double round_s =
      2 * (ground.spent() - before) * static_cast<double>(ground.left_of_a_round());
  const double needed = ground.spent() + round_s;
  if (needed > ground.settings.budget_s) {
    out.key = ground.key;
    out.end = TuneEnd::kTooSmall;
    out.least_budget_s = std::ceil(1.5 * needed);
    return;
  }
  Search search(ground.begin(round_s), ground.path, ground.settings, ground.start, differing);
  search.run(rank);
  out = search.outcome();
}

/// How often the best can be run again in the time by which a budget may be exceeded.
int explaining_rounds(const Ground& ground, const TuneOutcome& out, double set_up_s) {
  if (out.ranking.empty()) return 0;
  const std::size_t count = std::min(kExplained, out.ranking.size());
  double round_s = median(out.ranking.front().seconds);
  for (std::size_t i = 0; i < count; ++i) round_s += median(out.ranking[i].seconds);
  const double left = (1 + kExcess) * ground.settings.budget_s - ground.spent() - set_up_s;
  // As long again for comparing bits.
  return static_cast<int>(std::clamp(left / (2 * round_s), 0.0, double{kExplainingRuns}));
}

}  // namespace

std::string search_text(const BenchCase& bench, const TuneSettings& settings) {
  return cat(workload::to_string(bench.spec), ", skew ", formatted("%.17g", bench.skew), ", seed ",
             bench.seed, ", space ", settings.restriction, ", search seed ", settings.seed, ", ",
             settings.candidates, " candidates, ", settings.profile ? settings.profile->name : "no",
             " model, by ", to_string(this_build()));
}

TuneOutcome tune_pass(const BenchCase& bench, Pass pass, const TuneSettings& settings,
                      const Ranks& ranks) {
  Ground ground(bench, pass, settings, ranks.backend);
  const Schedule base = ground.base();
  const Schedule baseline = parse_schedule("sequential", default_schedule(ranks.backend));
  TuneOutcome out;
  double set_up_s = 0;
  ranks.run([&](Communicator& member, BenchDevice& device) {
    const auto begin = Clock::now();
    TuneRank rank(bench, pass, member, device, baseline);
    if (member.rank() != 0) {
      if (rank.follow() && !ranks.speaks) out.end = TuneEnd::kInterrupted;
      return;
    }
    set_up_s = seconds_since(begin);
    lead(ground, rank, out);
    rank.finish(out.end == TuneEnd::kInterrupted);
  });
  ranks.run([&](Communicator& member, BenchDevice& device) {
    Gatherer gatherer(device.bootstrap(member));
    const int rounds = gatherer.gather_one(explaining_rounds(ground, out, set_up_s))[0];
    if (rounds == 0) return;
    TuneRank rank(bench, pass, member, device, baseline, device.runs_ahead());
    if (member.rank() != 0) return void(rank.follow());
    explain_best(rank, base, rounds, out);
    rank.finish(false);
  });
  if (!ranks.speaks) return out;
  out.points = ground.space.combinations();
  out.modelled = ground.modelled;
  out.seconds = ground.spent();
  out.problems.insert(out.problems.end(), ground.problems.begin(), ground.problems.end());
  store_best(out, settings);
  if (is_finished(out) && !out.store_failed) tune::remove_session(ground.path);
  return out;
}

}  // namespace uniep::tool
