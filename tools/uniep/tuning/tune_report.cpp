#include "tuning/tune_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ostream>
#include <string_view>

#include "base/check.h"
#include "base/files.h"
#include "base/quantile.h"
#include "common/table.h"
#include "schedule/axes.h"

namespace uniep::tool {
namespace {

constexpr std::size_t kPrinted = 5;

const char* end_text(tune::TuneEnd end) {
  switch (end) {
    case tune::TuneEnd::kDecided:
      return "the winner is separated from noise";
    case tune::TuneEnd::kRounds:
      return "some could not be told apart";
    case tune::TuneEnd::kBudget:
      return "the budget is spent";
    case tune::TuneEnd::kTooSmall:
      return "the budget is too small for a round";
    case tune::TuneEnd::kInterrupted:
      break;
  }
  return "interrupted";
}

std::string stored_text(const tune::TuneOutcome& out, const std::string& cache) {
  if (out.stored) return display_name(cache);
  if (out.store_failed) return "nothing: the cache could not be written";
  return out.chosen ? "nothing: too few rounds" : "nothing: no schedule is left";
}

std::string best_text(const tune::TuneOutcome& out) {
  return cat("--schedule ", best_schedule(out),
             out.kept_default ? " (the default: nothing is faster by more than chance)" : "");
}

/// What the parts of an explanation, "0.472 ms more in dfc1; 0.1 ms less waiting", add up to.
double more_by(const std::string& why) {
  double sum_ms = 0;
  for (std::size_t begin = 0; begin < why.size();) {
    double ms = 0;
    char word[8] = "";
    if (std::sscanf(why.c_str() + begin, "%lf ms %7s", &ms, word) == 2) {
      sum_ms += word == std::string_view("more") ? ms : -ms;
    }
    begin = std::min(why.find_first_of(",;", begin), why.size() - 1) + 1;
  }
  return sum_ms;
}

std::string summary_text(const tune::TuneOutcome& out) {
  return cat(name(out.key.pass), ": ", counted(out.measurements, "measurement", "measurements"),
             out.resumed > 0 ? cat(" after ", out.resumed, " of an earlier session") : "", " in ",
             counted(out.rounds, "round", "rounds"), ", ", formatted("%.1f", out.seconds), " s; ",
             end_text(out.end));
}

Table ranking_table(const tune::TuneOutcome& out) {
  using enum Table::Align;
  Table table({kRight, kRight, kRight, kRight, kRight, kLeft});
  table.header({"", "", "median", "predicted", "over", ""});
  table.header({"place", "rounds", "(ms)", "(ms)", "default", "differs from the default in"});
  const Schedule base = default_schedule(out.key.backend);
  for (std::size_t i = 0; i < out.ranking.size() && i < kPrinted; ++i) {
    const tune::TunedCandidate& c = out.ranking[i];
    const std::string difference = difference_text(c.schedule, base);
    table.row({cat(i + 1), cat(c.seconds.size()), milliseconds(median(c.seconds)),
               c.predicted_s > 0 ? milliseconds(c.predicted_s) : "-", formatted("%.3f", c.speedup),
               difference.empty() ? "default" : difference});
  }
  return table;
}

void add_rejected(Notes& notes, const tune::TuneOutcome& out) {
  for (const tune::TunedCandidate& c : out.rejected) {
    notes.add("REJECTED", "wrong bits: " + to_string(c.schedule));
  }
}

Notes notes_of(const tune::TuneOutcome& out, const std::string& cache) {
  Notes notes;
  for (std::size_t i = 0; i < out.ranking.size() && i < kPrinted; ++i) {
    const std::string why = why_text(out.ranking[i]);
    if (!why.empty()) notes.add(cat("why ", i + 1), why);
  }
  add_rejected(notes, out);
  if (out.chosen) notes.add("best", best_text(out));
  notes.add("stored", stored_text(out, cache));
  return notes;
}

Json candidate_json(const tune::TunedCandidate& c) {
  Json ms = Json::array();
  for (const double s : c.seconds) ms.push_back(1e3 * s);
  return {{"schedule", to_string(c.schedule)},
          {"predicted_ms", c.predicted_s > 0 ? Json(1e3 * c.predicted_s) : Json()},
          {"ms", ms},
          {"speedup", c.speedup},
          {"rejected", c.rejected},
          {"why", why_text(c)}};
}

}  // namespace

std::string why_text(const tune::TunedCandidate& candidate) {
  const double more_ms = more_by(candidate.why);
  const bool contradicts = candidate.speedup > 1 ? more_ms > 0 : more_ms < 0;
  if (!contradicts || candidate.speedup == 1) return candidate.why;
  return cat("within noise: in the passes that were taken apart it was ",
             formatted("%.3f ms ", std::abs(more_ms)), more_ms > 0 ? "slower" : "faster",
             " than the default");
}

std::string state_text(const tune::TuneState& state) {
  std::string text =
      cat(name(state.pass), " round ", state.rounds, ", ", formatted("%.1f", state.spent_s),
          " s: ", state.running, " of ", state.candidates, " left");
  if (state.best_s) text += cat(", best ", milliseconds(*state.best_s), " ms");
  if (state.speedup) text += formatted(", default %.3f times as long", *state.speedup);
  return text;
}

std::string difference_text(const Schedule& schedule, const Schedule& base) {
  std::string text;
  for (std::size_t i = 0; i < schedule_axes().size(); ++i) {
    if (axis_value(schedule, i) == axis_value(base, i)) continue;
    const AxisInfo& axis = schedule_axes()[i];
    text += cat(text.empty() ? "" : ",", axis.name, '=',
                axis_value_text(axis, axis_value(schedule, i)));
  }
  return text;
}

std::string best_schedule(const tune::TuneOutcome& out) {
  const Schedule base = default_schedule(out.key.backend);
  const Schedule& best = out.chosen->schedule;
  return best == parse_schedule("single", base) ? "single" : difference_text(best, base);
}

void print_outcome(std::ostream& out, const tune::TuneOutcome& outcome, const std::string& cache,
                   const std::string& resume) {
  out << "#\n"
      << comment(summary_text(outcome))
      << comment(cat("the space has ", formatted("%.3g", outcome.points),
                     " points; the model looked at ", outcome.modelled))
      << ranking_table(outcome) << notes_of(outcome, cache);
  const bool goes_on =
      outcome.end == tune::TuneEnd::kInterrupted || outcome.end == tune::TuneEnd::kBudget;
  if (goes_on || outcome.store_failed) out << comment(resume);
  out << std::flush;
}

void print_rejected(std::ostream& out, const tune::TuneOutcome& outcome) {
  Notes notes;
  add_rejected(notes, outcome);
  out << notes << std::flush;
}

Json outcome_json(const tune::TuneOutcome& out) {
  Json candidates = Json::array();
  for (const auto* list : {&out.ranking, &out.rejected}) {
    for (const tune::TunedCandidate& c : *list) candidates.push_back(candidate_json(c));
  }
  return {{"direction", name(out.key.pass)},
          {"end", end_text(out.end)},
          {"default_ms", 1e3 * out.default_s},
          {"chosen", out.chosen ? Json(to_string(out.chosen->schedule)) : Json()},
          {"measurements", out.measurements},
          {"modelled", out.modelled},
          {"points", out.points},
          {"seconds", out.seconds},
          {"candidates", candidates}};
}

}  // namespace uniep::tool
