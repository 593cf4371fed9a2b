#include "tuning/tune_run.h"

#include <chrono>
#include <cmath>
#include <iostream>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/env.h"
#include "base/files.h"
#include "base/quantile.h"
#include "base/utc_now.h"
#include "common/choices.h"
#include "common/interrupt.h"
#include "common/machine.h"
#include "common/output_files.h"
#include "common/progress.h"
#include "common/record_json.h"
#include "common/table.h"
#include "tuning/survey_plot.h"
#include "tuning/survey_report.h"
#include "tuning/tune_report.h"

namespace uniep::tool {
namespace {

std::vector<Pass> passes_of(const TuneFlags& flags) {
  std::vector<Pass> passes;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    if (measures(pass_choice(flags.pass), pass)) passes.push_back(pass);
  }
  return passes;
}

/// "deepseek-v3": as given, or the name of the file.
std::string layer_name(const TuneCall& call) {
  return call.flags.input.empty() ? call.flags.shape : display_name(call.bench.name);
}

/// What the model knows of it; null: nothing.
Json network_json(const tune::Topology& network) {
  if (network.ranks_per_node == 0) return nullptr;
  return {{"bytes_per_s", network.nic_bytes_per_s},
          {"latency_s", network.nic_latency_s},
          {"message_s", network.message_s},
          {"message_byte_s", network.message_byte_s}};
}

void write_file(const TuneCall& call, bool interrupted, const Json& passes,
                const Json& more = Json::object()) {
  if (call.flags.json.empty()) return;
  const auto& profile = call.settings.profile;
  Json file{{"schema", "uniep-tune-1"},
            {"version", this_build().version},
            {"commit", this_build().commit},
            {"machine", call.ranks.machine},
            {"backend", name(call.ranks.backend)},
            {"date", utc_now()},
            {"command", call.invocation.command},
            {"shape", layer_name(call)},
            {"input", call.flags.input.empty() ? Json() : Json(call.flags.input)},
            {"ranks", call.ranks.count},
            {"hosts", call.ranks.hosts},
            {"skew", call.bench.skew},
            {"arithmetic", arithmetic_words(call.bench.problem)},
            {"profile", profile ? Json(profile->source) : Json()},
            {"network", network_json(call.settings.topology)},
            {"interrupted", interrupted}};
  file.update(more);
  file["passes"] = passes;
  write_json(call.flags.json, file);
}

/// Shows how a search comes along: a bar of the budget, and no more lines than one can read.
class TuneProgress {
 public:
  TuneProgress(Pass pass, double budget_s)
      : progress_(cat("tuning ", name(pass)), static_cast<std::int64_t>(1e3 * budget_s)) {}

  void show(const tune::TuneState& state) {
    progress_.set_done(static_cast<std::int64_t>(1e3 * state.spent_s));
    // Rounds of an earlier session were printed then.
    if (state.rounds == std::exchange(rounds_, state.rounds).value_or(state.rounds)) return;
    progress_.set_label(cat("tuning ", name(state.pass), ", round ", state.rounds, ", ",
                            state.running, " of ", state.candidates, " left"));
    const auto now = std::chrono::steady_clock::now();
    if (!state.best_s || (printed_ && now - *printed_ < std::chrono::seconds(1))) return;
    printed_ = now;
    const Progress::Pause pause(progress_);
    std::cout << comment(state_text(state)) << std::flush;
  }

 private:
  Progress progress_;
  std::optional<int> rounds_;
  std::optional<std::chrono::steady_clock::time_point> printed_;
};

/// What would do for a search whose budget was spent in its first round: as long as it took, and
/// for each candidate two passes and two comparisons of bits, with some room.
double enough_budget_s(const tune::TuneOutcome& out, std::size_t candidates) {
  const double pass_s = out.default_s > 0 ? out.default_s : out.seconds;
  return std::ceil(1.5 * (out.seconds + 4 * pass_s * static_cast<double>(candidates)));
}

tune::TuneOutcome tune_visibly(const TuneCall& call, Pass pass) {
  if (!call.ranks.speaks) return tune_pass(call.bench, pass, call.settings, call.ranks);
  TuneProgress progress(pass, call.settings.budget_s);
  tune::TuneSettings settings = call.settings;
  std::size_t candidates = settings.candidates;
  settings.watch.measured = [&](const tune::TuneState& state) {
    candidates = state.candidates;
    progress.show(state);
  };
  tune::TuneOutcome out = tune_pass(call.bench, pass, settings, call.ranks);
  call_too_small(out, candidates);
  return out;
}

void print(const tune::TuneOutcome& out, const TuneCall& call) {
  if (out.end == tune::TuneEnd::kTooSmall) {
    print_rejected(std::cout, out);
    std::cerr << "uniep tune: " << too_small_text(call.flags, out.key.pass, out.least_budget_s)
              << '\n';
    return;
  }
  print_outcome(
      std::cout, out, call.settings.cache,
      cat("the same command goes on from here", call.flags.fresh ? " without --fresh" : ""));
  for (const std::string& p : out.problems) std::cerr << "uniep tune: " << p << '\n';
}

/// Passes of each point of a survey, of which the least counts: threads that share cores with
/// others are disturbed more often than a GPU.
int survey_rounds(Backend backend) { return backend == Backend::kCpu ? 15 : 5; }

SurveyOfPass survey_visibly(const TuneCall& call, Pass pass) {
  // In thousandths: how many passes there will be is not known yet.
  constexpr std::int64_t kWhole = 1000;
  std::optional<Progress> progress;
  if (call.ranks.speaks) progress.emplace(cat("surveying ", name(pass)), kWhole);
  const SurveySize size{call.flags.survey, survey_rounds(call.ranks.backend)};
  return survey_pass(call.bench, pass, size, call.settings, call.ranks,
                     [&](std::size_t done, std::size_t of) {
                       if (!progress) return;
                       progress->set_done(kWhole * static_cast<std::int64_t>(done) /
                                          static_cast<std::int64_t>(of));
                     });
}

/// Every direction, as far as it is not interrupted.
std::vector<SurveyOfPass> survey_passes(const TuneCall& call) {
  std::vector<SurveyOfPass> all;
  for (const Pass pass : passes_of(call.flags)) {
    all.push_back(survey_visibly(call, pass));
    if (all.back().interrupted) break;
  }
  return all;
}

/// What stands around a survey's picture.
trace::PageText survey_page(const TuneCall& call, Pass pass) {
  const auto& [flags, invocation, ranks, settings, bench] = call;
  const workload::ShapeSpec& spec = bench.spec;
  const std::string link = ranks.backend == Backend::kCpu ? link_text() : "";
  const std::string name_of_layer = flags.input.empty() ? spec.name : layer_name(call);
  return {
      .title = cat(name_of_layer, ", ", name(pass), ": predicted over measured times"),
      .notes = {cat(spec.tokens, " tokens a rank, hidden ", spec.hidden, ", intermediate ",
                    spec.intermediate, ", ", spec.num_experts, " experts, top-", spec.topk,
                    flags.input.empty() ? cat("; seed ", flags.seed) : "", ", skew ", bench.skew),
                cat("backend ", name(ranks.backend), ", ", ranks.count,
                    ranks.count == 1 ? " rank; " : " ranks; ", ranks.machine,
                    link.empty() ? "" : "; link " + link),
                cat("predicted from profile ", settings.profile->name, " (",
                    settings.profile->device, "); measured: the least of ",
                    survey_rounds(ranks.backend), " passes each"),
                cat("uniep ", to_string(this_build()), ", ", utc_now()), invocation.command},
      .schedule = {}};
}

void draw(const TuneCall& call, const SurveyOfPass& survey) {
  if (call.flags.plot.empty()) return;
  const trace::PageText page = survey_page(call, survey.pass);
  write_text(call.flags.plot, [&](std::ostream& out) { out << draw_survey(page, survey.points); });
}

}  // namespace

std::string too_small_text(const TuneFlags& flags, Pass pass, double least_budget_s) {
  return cat("--budget ", formatted("%g", flags.budget), " is too small for the ", name(pass),
             " pass: making the layer and one round of measurements take longer; --budget ",
             formatted("%.0f", least_budget_s), " would do");
}

void call_too_small(tune::TuneOutcome& out, std::size_t candidates) {
  if (out.end != tune::TuneEnd::kBudget || out.rounds > 0) return;
  out.end = tune::TuneEnd::kTooSmall;
  out.least_budget_s = enough_budget_s(out, candidates);
}

void print_tune_header(const TuneCall& call) {
  const auto& [flags, invocation, ranks, settings, bench] = call;
  const std::string routing =
      flags.input.empty()
          ? cat("seed=", flags.seed, ", skew=", flags.skew)
          : cat(display_name(flags.input), ", whose routing has a skew of ", bench.skew);
  Notes notes;
  notes.add("uniep", cat(to_string(this_build()), ", backend ", name(ranks.backend)));
  notes.add("machine", ranks.machine);
  const std::string link = link_text_of(ranks);
  if (!link.empty()) notes.add("link", link);
  notes.add("date", utc_now());
  notes.add("shape", cat(workload::to_string(bench.spec), "; ", routing));
  const std::string arithmetic = arithmetic_text(bench.problem);
  if (!arithmetic.empty()) notes.add("experts", arithmetic);
  notes.add("ranks", ranks_text(ranks));
  notes.add("model",
            settings.profile ? settings.profile->source : "none: candidates are drawn at random");
  const tune::Topology& network = settings.topology;
  if (network.ranks_per_node > 0) {
    notes.add("network",
              cat(formatted("%.3g GB/s", 1e-9 * network.nic_bytes_per_s), " and ",
                  formatted("%.3g us", 1e6 * network.nic_latency_s), " between hosts, ",
                  formatted("%.3g us", 1e6 * network.message_s),
                  " of a core at each end of a message and ",
                  formatted("%.3g us", 1e12 * network.message_byte_s), " more a MB; measured"));
  }
  notes.add("default", to_string(default_schedule(ranks.backend)));
  std::cout << notes << std::flush;
}

TunedLayer tune_layer(const TuneCall& call) {
  TunedLayer layer;
  std::vector<tune::TunedCandidate> chosen;
  const std::vector<Pass> directions = passes_of(call.flags);
  for (const Pass pass : directions) {
    const tune::TuneOutcome out = tune_visibly(call, pass);
    layer.interrupted = out.end == tune::TuneEnd::kInterrupted;
    if (call.ranks.speaks) {
      print(out, call);
      layer.too_small = layer.too_small || out.end == tune::TuneEnd::kTooSmall;
      layer.failed = layer.failed || !out.rejected.empty() || out.store_failed;
      if (out.end != tune::TuneEnd::kTooSmall) layer.passes.push_back(outcome_json(out));
      if (out.chosen) {
        chosen.push_back(*out.chosen);
        layer.schedules +=
            cat(layer.schedules.empty() ? "" : ", ", best_schedule(out), " (", name(pass), ")");
      }
    }
    if (layer.interrupted) break;
  }
  if (chosen.size() == directions.size()) {
    layer.seconds = 0;
    for (const tune::TunedCandidate& c : chosen) *layer.seconds += median(c.seconds);
  }
  return layer;
}

void write_tuning(const TuneCall& call, const TunedLayer& layer, const Json& more) {
  write_file(call, layer.interrupted, layer.passes, more);
}

int exit_code(const TunedLayer& layer) {
  if (layer.failed) return kExitFailed;
  if (layer.interrupted) return Interrupt::exit_code();
  return layer.too_small ? kExitBadInput : kExitOk;
}

int run_tuning(const TuneCall& call) {
  const TunedLayer layer = tune_layer(call);
  if (!call.ranks.speaks) return kExitOk;
  write_tuning(call, layer);
  return exit_code(layer);
}

int run_survey(const TuneCall& call) {
  const std::vector<SurveyOfPass> surveys = survey_passes(call);
  if (!call.ranks.speaks) return kExitOk;
  print_surveys(std::cout, surveys, survey_rounds(call.ranks.backend));
  const SurveyOfPass& last = surveys.back();
  if (last.interrupted) {
    std::cout << comment(cat("interrupted after ", last.passes, " of ", last.wanted,
                             " passes of the ", name(last.pass), " direction"));
  }
  Json passes = Json::array();
  for (const SurveyOfPass& survey : surveys) passes.push_back(survey_json(survey));
  write_file(call, last.interrupted, passes);
  draw(call, last);
  return last.interrupted ? Interrupt::exit_code() : kExitOk;
}

}  // namespace uniep::tool
