#include "tune/search/tuner.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/quantile.h"
#include "base/utc_now.h"
#include "tune/book/tune_key.h"
#include "tune/search/candidates.h"
#include "tune/search/explain.h"
#include "tune/search/search.h"
#include "tune/search/starting_points.h"

namespace uniep::tune {
namespace {

/// Part of the budget by which a search may exceed it, to explain what it found.
constexpr double kExcess = 0.2;
constexpr std::size_t kExplained = 5;
constexpr int kExplainingRuns = 9;
/// A busy machine may make one look at the default far too long.
constexpr int kLooks = 3;

bool is_finished(const TuneOutcome& out) {
  return out.end == TuneEnd::kDecided || out.end == TuneEnd::kRounds;
}

/// A budget that would do where so much is needed.
double enough_s(double needed_s) { return std::ceil(1.5 * needed_s); }

/// Whether passes say what their stages took: on a GPU only those that record a timeline do.
bool has_stages(const Breakdown& b) {
  return std::ranges::any_of(b.busy, [](double seconds) { return seconds > 0; });
}

}  // namespace

Tuner::Tuner(TuneSubject subject, const TuneSettings& settings)
    : subject_(std::move(subject)),
      settings_(settings),
      start_(Clock::now()),
      place_(this_place(subject_.key.backend)),
      space_(subject_.problem, subject_.key.pass, place_) {
  space_.restrict_to(settings_.restriction);
  if (settings_.keep_session && !settings_.cache.empty()) {
    path_ = session_path(settings_.cache, subject_.key, subject_.identity);
  }
  if (settings_.resume && !path_.empty()) {
    const auto invalid = [&](const Schedule& s) {
      return invalid_reason(s, subject_.problem, place_);
    };
    session_ = load_session(path_, subject_.key, subject_.identity, invalid, problems_);
  }
  if (!session_) {
    known_ = starting_points(space_, subject_.problem, subject_.key, place_,
                             settings_.profile ? &*settings_.profile : nullptr);
  }
  base_ = session_ ? session_->candidates.front().schedule : known_.front();
}

double Tuner::spent() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

/// Measurements that a first round still takes, each of two passes.
std::size_t Tuner::left_of_a_round() const {
  if (!session_) return known_.size() + settings_.candidates;
  return static_cast<std::size_t>(std::ranges::count_if(
      session_->candidates, [](const auto& c) { return c.seconds.empty() && !c.rejected; }));
}

/// The session that the search starts from: the one read from its file, or a new one. Its
/// candidates come by a model that takes at most a quarter of what is left beside a round.
Session Tuner::begin(double round_s) {
  if (session_) return std::move(*session_);
  std::vector<Ranked> by_model;
  if (settings_.profile) {
    const double seconds = (settings_.budget_s - spent() - round_s) / 4;
    const auto plans =
        plans_to_simulate(subject_.problem, subject_.tokens_per_rank, subject_.topk_ids,
                          kMostSimulatedRanks, subject_.key.hosts);
    by_model = rank_by_model(plans, subject_.key.pass, space_, known_, *settings_.profile,
                             settings_.topology, seconds, settings_.seed);
    modelled_ = by_model.size();
  }
  return {subject_.key, subject_.identity, utc_now(),
          candidates_of(space_, known_, by_model, settings_.candidates, settings_.seed)};
}

Tuner::FirstLook Tuner::look_at_default(const Measure& measure) const {
  FirstLook look;
  look.differing = measure(base_).differing;  // touches memory first
  const double before = spent();
  look.differing += measure(base_).differing;
  look.round_s = 2 * (spent() - before) * static_cast<double>(left_of_a_round());
  look.needed_s = spent() + look.round_s;
  return look;
}

std::optional<double> Tuner::missing_budget_s(const Measure& measure) {
  const double before_s = spent();
  double needed_s = look_at_default(measure).needed_s;
  for (int i = 1; i < kLooks && needed_s > settings_.budget_s; ++i) {
    const double looked_s = spent() - before_s;
    needed_s = std::min(needed_s, look_at_default(measure).needed_s - looked_s);
  }
  if (needed_s <= settings_.budget_s) return std::nullopt;
  return enough_s(needed_s);
}

TuneEnd Tuner::search(const Measure& measure) {
  const FirstLook look = look_at_default(measure);
  if (look.needed_s > settings_.budget_s) {
    out_.key = subject_.key;
    out_.end = TuneEnd::kTooSmall;
    out_.least_budget_s = enough_s(look.needed_s);
    return out_.end;
  }
  Search search(begin(look.round_s), path_, settings_, start_, look.differing);
  search.run(measure);
  out_ = search.outcome();
  return out_.end;
}

int Tuner::explaining_rounds(double set_up_s) const {
  if (out_.ranking.empty() || out_.end == TuneEnd::kInterrupted) return 0;
  const std::size_t count = std::min(kExplained, out_.ranking.size());
  double round_s = median(out_.ranking.front().seconds);
  for (std::size_t i = 0; i < count; ++i) round_s += median(out_.ranking[i].seconds);
  const double left = (1 + kExcess) * settings_.budget_s - spent() - set_up_s;
  // Comparing bits takes as long again.
  return static_cast<int>(std::clamp(left / (2 * round_s), 0.0, double{kExplainingRuns}));
}

void Tuner::explain_best(const Measure& measure, int rounds) {
  if (rounds == 0) return;
  const std::size_t count = std::min(kExplained, out_.ranking.size());
  std::vector<std::vector<Breakdown>> runs(count + 1);
  for (int i = 0; i < rounds && (i == 0 || !settings_.watch.stop()); ++i) {
    for (std::size_t c = 0; c <= count; ++c) {
      const Schedule& s = c == count ? base_ : out_.ranking[c].schedule;
      runs[c].push_back(breakdown_of(measure(s).by_rank));
    }
  }
  const Breakdown of_default = median_of(runs[count]);
  if (!has_stages(of_default)) return;
  for (std::size_t c = 0; c < count; ++c) {
    out_.ranking[c].why =
        out_.ranking[c].schedule == base_ ? "the default" : explain(median_of(runs[c]), of_default);
    if (out_.chosen && out_.chosen->schedule == out_.ranking[c].schedule) {
      out_.chosen->why = out_.ranking[c].why;
    }
  }
  if (out_.kept_default) out_.chosen->why = "the default";
}

/// Stores nothing if rounds were too few to tell anything apart: then the default was kept for that
/// alone, and must not take the place of what a longer search found.
void Tuner::store_best() {
  if (!out_.chosen || !out_.conclusive || settings_.cache.empty()) return;
  const TunedCandidate& best = *out_.chosen;
  const TunedEntry entry{.key = out_.key,
                         .schedule = best.schedule,
                         .ms = 1e3 * median(best.seconds),
                         .default_ms = 1e3 * out_.default_s,
                         .date = utc_now()};
  try {
    for (std::string& p : TuneCache(settings_.cache).store(entry)) {
      out_.problems.push_back(std::move(p));
    }
    out_.stored = true;
  } catch (const Error& e) {  // what was found is still reported
    out_.store_failed = true;
    out_.problems.push_back(cat("what was found is not stored: ", e.what()));
  }
}

TuneOutcome Tuner::finish() {
  out_.points = space_.combinations();
  out_.modelled = modelled_;
  out_.seconds = spent();
  out_.problems.insert(out_.problems.end(), problems_.begin(), problems_.end());
  store_best();
  if (is_finished(out_) && !out_.store_failed && !path_.empty()) remove_session(path_);
  return std::move(out_);
}

}  // namespace uniep::tune
