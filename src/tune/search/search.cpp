#include "tune/search/search.h"

#include <utility>

#include "base/check.h"
#include "base/utc_now.h"

namespace uniep::tune {
namespace {

constexpr std::chrono::seconds kBetweenSaves(1);

double seconds_since(Search::Clock::time_point start) {
  return std::chrono::duration<double>(Search::Clock::now() - start).count();
}

TunedCandidate tuned(const SessionCandidate& c) {
  return {.schedule = c.schedule,
          .predicted_s = c.predicted_s,
          .seconds = c.seconds,
          .rejected = c.rejected};
}

}  // namespace

Search::Search(Session session, std::string path, const TuneSettings& settings,
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

void Search::replay() {
  std::vector<std::size_t> used(session_.candidates.size(), 0);
  while (const auto c = race_.next()) {
    const SessionCandidate& stored = session_.candidates[*c];
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

std::optional<TuneEnd> Search::reason_to_end() const {
  if (settings_.watch.stop()) return TuneEnd::kInterrupted;
  if (seconds_since(start_) > settings_.budget_s) return TuneEnd::kBudget;
  return std::nullopt;
}

void Search::run(const Measure& run_pass) {
  std::optional<TuneEnd> early;
  while (const auto candidate = race_.next()) {
    early = reason_to_end();
    if (early) break;
    measure(run_pass, *candidate);
    if (Clock::now() - saved_ >= kBetweenSaves) save();
    settings_.watch.measured(state());
  }
  end_ = early.value_or(race_.decided() ? TuneEnd::kDecided : TuneEnd::kRounds);
  save();
}

void Search::measure(const Measure& run_pass, std::size_t candidate) {
  SessionCandidate& c = session_.candidates[candidate];
  // A schedule's first pass pays for memory that it is the first to touch.
  std::int64_t at_first = 0;
  if (candidate == 0) {
    at_first = std::exchange(differing_before_, 0);
  } else if (c.seconds.empty()) {
    at_first = run_pass(c.schedule).differing;
  }
  const Measurement m = run_pass(c.schedule);
  ++measurements_;
  if (at_first + m.differing > 0) {
    c.rejected = true;
    race_.reject(candidate);
    return;
  }
  c.seconds.push_back(m.seconds);
  race_.record(candidate, m.seconds);
}

TuneState Search::state() const {
  TuneState state{.pass = session_.key.pass,
                  .rounds = race_.rounds(),
                  .running = race_.running(),
                  .candidates = session_.candidates.size(),
                  .spent_s = seconds_since(start_)};
  const std::vector<std::size_t> ranking = race_.ranking();
  if (state.rounds == 0 || ranking.empty()) return state;
  state.best_s = race_.median(ranking.front());
  state.speedup = race_.speedup(ranking.front());
  return state;
}

void Search::save() {
  if (path_.empty()) return;
  session_.date = utc_now();
  saved_ = Clock::now();
  try {
    save_session(path_, session_);
  } catch (const Error& e) {  // a search that cannot be resumed is still one
    save_problem_ = cat("the session is not kept: ", e.what());
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
    out.ranking.push_back(tuned(session_.candidates[i]));
    out.ranking.back().speedup = race_.speedup(i);
    out.ranking.back().faster = race_.is_faster(i);
    if (out.ranking.size() == 1) out.chosen = out.ranking.front();
    // The default stays if chance may have put another in front.
    if (i == 0 && !out.chosen->faster) {
      out.chosen = out.ranking.back();
      out.kept_default = true;
    }
  }
  for (const SessionCandidate& c : session_.candidates) {
    if (c.rejected) out.rejected.push_back(tuned(c));
  }
  return out;
}

}  // namespace uniep::tune
