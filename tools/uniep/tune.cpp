#include <algorithm>
#include <iostream>
#include <memory>

#include "base/check.h"
#include "base/quantile.h"
#include "commands.h"
#include "interrupt.h"
#include "machine.h"
#include "measure_profile.h"
#include "options.h"
#include "output_files.h"
#include "profiles.h"
#include "progress.h"
#include "record_json.h"
#include "schedule/axes.h"
#include "survey.h"
#include "table.h"
#include "tune/schedule_book.h"
#include "tune/tune_key.h"
#include "tuner.h"

namespace uniep::tool {
namespace {

using enum Table::Align;

struct Flags {
  std::string shape;
  int ranks = 0;
  std::string backend = "cpu";
  std::string pass = "both";
  std::uint64_t seed = 0;
  double skew = 0;
  double budget = 60;
  int candidates = 16;
  std::string space;
  std::string profile = "auto";
  bool fresh = false;
  int survey = 0;
  std::string json;
  std::string plot;
};

/// Passes of each point of a survey, of which the least counts: threads that share cores with
/// others are disturbed more often than a GPU.
int survey_rounds(Backend backend) { return backend == Backend::kCpu ? 15 : 5; }
constexpr std::size_t kPrinted = 5;

/// The profile that the flag names; nothing for "none", and where "auto" knows none.
std::optional<tune::MachineProfile> profile_of(const Flags& flags, const Ranks& ranks) {
  if (flags.profile == "none") return std::nullopt;
  if (flags.profile != "auto") {
    const tune::MachineProfile named = find_profile(flags.profile);
    require(named.backend == ranks.backend, ErrorCode::kInvalidArgument, "profile ", named.name,
            " is of backend ", name(named.backend), "; one of backend ", name(ranks.backend),
            " is accepted");
    return ranks.backend == Backend::kCpu ? with_emulated_link(named) : named;
  }
  if (ranks.backend == Backend::kCuda) {
    const std::string device = tune::tune_key(ranks.backend, {}, 1, 0, 0, Pass::kForward).device;
    return tune::shipped_profile_of(ranks.backend, device);
  }
  constexpr double kEffort = 0.3;
  const Progress progress("measuring this machine", 0);
  return measure_cpu_profile(kEffort, [] {}).profile;
}

TuneSettings settings_of(const Flags& flags, const Ranks& ranks) {
  TuneSettings s;
  s.budget_s = flags.budget;
  s.candidates = static_cast<std::size_t>(flags.candidates);
  s.restriction = flags.space;
  s.profile = profile_of(flags, ranks);
  s.cache = tune::TuneCache::default_path();
  s.resume = !flags.fresh;
  return s;
}

std::vector<Pass> passes_of(const Flags& flags) {
  std::vector<Pass> passes;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    if (measures(pass_choice(flags.pass), pass)) passes.push_back(pass);
  }
  return passes;
}

/// "single but lag=4": the axes in which it is not the default.
std::string difference_text(const Schedule& s, const Schedule& base) {
  std::string text;
  for (std::size_t i = 0; i < schedule_axes().size(); ++i) {
    if (axis_value(s, i) == axis_value(base, i)) continue;
    const AxisInfo& axis = schedule_axes()[i];
    text += cat(text.empty() ? "" : ",", axis.name, '=', axis_value_text(axis, axis_value(s, i)));
  }
  return text.empty() ? "default" : text;
}

const char* end_text(TuneEnd end) {
  switch (end) {
    case TuneEnd::kDecided:
      return "the winner is separated from noise";
    case TuneEnd::kRounds:
      return "some could not be told apart";
    case TuneEnd::kBudget:
      return "the budget is spent";
    case TuneEnd::kTooSmall:
      return "the budget is too small for a round";
    case TuneEnd::kInterrupted:
      break;
  }
  return "interrupted";
}

const char* nothing_stored_text(const TuneOutcome& out) {
  if (out.store_failed) return "nothing: the cache could not be written";
  return out.chosen ? "nothing: too few rounds" : "nothing: no schedule is left";
}

void print_too_small(const TuneOutcome& out, const Flags& flags) {
  std::cerr << "uniep tune: --budget " << formatted("%g", flags.budget) << " is too small for the "
            << name(out.key.pass)
            << " pass: making the layer and one round of measurements take longer; --budget "
            << formatted("%.0f", out.least_budget_s) << " would do\n";
}

void print_outcome(const TuneOutcome& out, const Flags& flags, const TuneSettings& settings) {
  const Schedule base = default_schedule(out.key.backend);
  std::cout << "#\n# " << name(out.key.pass) << ": " << out.measurements << " measurements"
            << (out.resumed > 0 ? cat(" after ", out.resumed, " of an earlier session") : "")
            << " in " << out.rounds << " rounds, " << formatted("%.1f", out.seconds) << " s; "
            << end_text(out.end) << "\n#   the space has " << formatted("%.3g", out.points)
            << " points; the model looked at " << out.modelled << '\n';
  Table table({kRight, kRight, kRight, kRight, kLeft});
  table.header({"", "median", "predicted", "over", ""});
  table.header({"place", "(ms)", "(ms)", "default", "differs from the default in"});
  for (std::size_t i = 0; i < out.ranking.size() && i < kPrinted; ++i) {
    const TunedCandidate& c = out.ranking[i];
    const double ms = median(c.seconds);
    table.row({cat(i + 1), milliseconds(ms), c.predicted_s > 0 ? milliseconds(c.predicted_s) : "-",
               formatted("%.3f", c.speedup), difference_text(c.schedule, base)});
  }
  std::cout << table;
  for (std::size_t i = 0; i < out.ranking.size() && i < kPrinted; ++i) {
    std::cout << "# why " << i + 1 << "  " << out.ranking[i].why << '\n';
  }
  for (const TunedCandidate& c : out.rejected) {
    std::cout << "# REJECTED, wrong bits: " << to_string(c.schedule) << '\n';
  }
  if (out.chosen) {
    std::cout << "# best   --schedule " << to_string(out.chosen->schedule)
              << (out.kept_default ? " (the default: nothing is faster by more than chance)" : "")
              << '\n';
  }
  std::cout << "# stored " << (out.stored ? settings.cache : nothing_stored_text(out)) << '\n';
  if (out.end == TuneEnd::kInterrupted || out.end == TuneEnd::kBudget || out.store_failed) {
    std::cout << "# the same command goes on from here" << (flags.fresh ? " without --fresh" : "")
              << '\n';
  }
  std::cout << std::flush;
  for (const std::string& p : out.problems) std::cerr << "uniep tune: " << p << '\n';
}

Json outcome_json(const TuneOutcome& out) {
  Json candidates = Json::array();
  for (const auto* list : {&out.ranking, &out.rejected}) {
    for (const TunedCandidate& c : *list) {
      Json ms = Json::array();
      for (const double s : c.seconds) ms.push_back(1e3 * s);
      candidates.push_back(
          {{"schedule", to_string(c.schedule)},
           {"predicted_ms", c.predicted_s > 0 ? Json(1e3 * c.predicted_s) : Json()},
           {"ms", ms},
           {"speedup", c.speedup},
           {"rejected", c.rejected},
           {"why", c.why}});
    }
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

Json file_json(const Flags& flags, const Invocation& invocation, const Ranks& ranks,
               const TuneSettings& settings, const Json& passes) {
  return {{"schema", "uniep-tune-1"},
          {"version", this_build().version},
          {"commit", this_build().commit},
          {"machine", ranks.machine},
          {"backend", name(ranks.backend)},
          {"date", utc_now()},
          {"command", invocation.command},
          {"shape", flags.shape},
          {"ranks", ranks.count},
          {"skew", flags.skew},
          {"profile", settings.profile ? Json(settings.profile->source) : Json()},
          {"passes", passes}};
}

void print_header(const Flags& flags, const Ranks& ranks, const TuneSettings& settings,
                  const BenchCase& bench) {
  Notes notes;
  notes.add("uniep", cat(to_string(this_build()), ", backend ", name(ranks.backend)));
  notes.add("machine", ranks.machine);
  if (ranks.backend == Backend::kCpu && !link_text().empty()) notes.add("link", link_text());
  notes.add("date", utc_now());
  notes.add("shape",
            cat(workload::to_string(bench.spec), "; seed=", flags.seed, ", skew=", flags.skew));
  notes.add("ranks", cat(ranks.count));
  notes.add("model",
            settings.profile ? settings.profile->source : "none: candidates are drawn at random");
  notes.add("default", to_string(default_schedule(ranks.backend)));
  std::cout << notes << std::flush;
}

int tune(const Flags& flags, const Invocation& invocation, const Ranks& ranks,
         const TuneSettings& settings, const BenchCase& bench) {
  const Interrupt interrupt;
  Json passes = Json::array();
  bool failed = false, too_small = false;
  for (const Pass pass : passes_of(flags)) {
    const TuneOutcome out = tune_pass(bench, pass, settings, ranks);
    if (ranks.speaks && out.end == TuneEnd::kTooSmall) {
      print_too_small(out, flags);
      too_small = true;
    } else if (ranks.speaks) {
      print_outcome(out, flags, settings);
      passes.push_back(outcome_json(out));
      failed = failed || !out.rejected.empty() || out.store_failed;
    }
    if (out.end == TuneEnd::kInterrupted) break;
  }
  if (ranks.speaks && !flags.json.empty()) {
    write_json(flags.json, file_json(flags, invocation, ranks, settings, passes));
  }
  return failed ? kExitFailed : too_small ? kExitBadInput : kExitOk;
}

Json survey_json(Pass pass, const Agreement& a, const std::vector<SurveyPoint>& points) {
  Json list = Json::array();
  for (const SurveyPoint& p : points) {
    list.push_back({{"schedule", to_string(p.schedule)},
                    {"predicted_ms", 1e3 * p.predicted_s},
                    {"ms", 1e3 * p.measured_s}});
  }
  return {{"direction", name(pass)},
          {"rank_correlation", a.rank_correlation},
          {"median_error", a.median_error},
          {"p90_error", a.p90_error},
          {"pick", a.pick},
          {"points", list}};
}

int survey(const Flags& flags, const Invocation& invocation, const Ranks& ranks,
           const TuneSettings& settings, const BenchCase& bench) {
  const Interrupt interrupt;
  Table table({kLeft, kRight, kRight, kRight, kRight, kRight});
  table.header({"", "", "rank", "median", "90 %", "best over"});
  table.header({"direction", "points", "correlation", "error", "error", "model's pick"});
  Json passes = Json::array();
  const int rounds = survey_rounds(ranks.backend);
  std::vector<SurveyPoint> last;
  for (const Pass pass : passes_of(flags)) {
    bool interrupted = false;
    last = survey_pass(bench, pass, {flags.survey, rounds}, settings, ranks, interrupted);
    const Agreement a = agreement_of(last);
    table.row({name(pass), cat(last.size()), formatted("%.3f", a.rank_correlation),
               formatted("%.1f %%", 100 * a.median_error), formatted("%.1f %%", 100 * a.p90_error),
               formatted("%.3f", a.pick)});
    passes.push_back(survey_json(pass, a, last));
    if (interrupted) break;
  }
  if (!ranks.speaks) return kExitOk;
  std::cout << "#\n# random points, or all of a space that has no more, the least of " << rounds
            << " passes each, beside what the model says\n"
            << table;
  if (!flags.json.empty()) {
    write_json(flags.json, file_json(flags, invocation, ranks, settings, passes));
  }
  if (!flags.plot.empty()) {
    const std::string title = cat(flags.shape, ", ", ranks.count, " ranks, ",
                                  passes.back().at("direction").get<std::string>());
    write_text(flags.plot, [&](std::ostream& out) {
      out << draw_survey(title, {ranks.machine, invocation.command}, last);
    });
  }
  return kExitOk;
}

int run(const Flags& flags, const Invocation& invocation) {
  std::vector<NamedFile> inputs = tuned_files();
  inputs.push_back(profile_file("--profile", flags.profile));
  require_usable_outputs({{"--json", flags.json}, {"--plot", flags.plot}}, inputs);
  require(flags.plot.empty() || flags.survey > 0, ErrorCode::kInvalidArgument,
          "--plot draws a survey; --survey N is needed");
  const Backend backend = backend_choice(flags.backend);
  const auto refuse = [&](int ranks) {
    refuse_sharing("uniep tune", backend, ranks);
    const workload::ShapeSpec spec = parse_bench_shape(flags.shape, ranks);
    if (backend == Backend::kCpu) require_memory(spec, ranks, 3);
    Space(Problem{}, Pass::kForward, {backend, 0}).restrict_to(flags.space);
    if (flags.survey == 0) tune::TuneCache(tune::TuneCache::default_path()).require_storable();
  };
  return with_ranks(backend, flags.ranks, invocation, refuse, [&](const Ranks& ranks) {
    refuse_sharing("uniep tune", ranks);
    const BenchCase bench = make_case(flags.shape, ranks.count, flags.seed, flags.skew);
    const TuneSettings settings = settings_of(flags, ranks);
    if (ranks.speaks) print_header(flags, ranks, settings, bench);
    return flags.survey > 0 ? survey(flags, invocation, ranks, settings, bench)
                            : tune(flags, invocation, ranks, settings, bench);
  });
}

void add_what_options(CLI::App& sub, Flags& flags) {
  OptionGroup group(sub, "What to tune");
  group
      .add("--shape", flags.shape, "NAME[,key=value...]",
           "Layer to make up, tokens of one rank. Names: " + shapes_and_keys())
      ->required();
  group
      .add("--ranks", flags.ranks, "N",
           cat("Ranks, 1 to 64 (default: ", kDefaultCpuRanks, "; with cuda: every GPU)"))
      ->check(range(1, 64));
  group
      .add("--backend", flags.backend, "NAME",
           "cpu (default), or cuda: a process for each GPU, as in uniep bench")
      ->check(one_of({"cpu", "cuda"}));
  group
      .add("--pass", flags.pass, "DIRECTION", "forward, backward or both (default), each by itself")
      ->check(one_of({"forward", "backward", "both"}));
  group.add("--seed", flags.seed, "S", "Seed of the layer (default 0)")->check(a_seed());
  group
      .add("--skew", flags.skew, "Z",
           "How unevenly experts are loaded, 0 to 100: 0 (default) evenly, 1 like Zipf's law")
      ->check(a_skew());
}

void add_how_options(CLI::App& sub, Flags& flags) {
  OptionGroup group(sub, "How to search");
  group
      .add("--budget", flags.budget, "SECONDS",
           "Time for each direction, 0.1 to 86400 (default 60)")
      ->check(range(0.1, 86400.0));
  group
      .add("--candidates", flags.candidates, "N",
           "Points that the model proposes for measuring, 1 to 1000 (default 16), besides the "
           "default and the presets")
      ->check(range(1, 1000));
  group.add("--space", flags.space, "axis=value|value,...",
            "Try only these values of the axes named; docs/schedule.md lists what is tried else");
  group.add(
      "--profile", flags.profile, "FILE|NAME|auto|none",
      "What the model knows of the machine. auto (default): on the CPU measured now, for GPUs "
      "a shipped profile of theirs; none: candidates are drawn at random");
  sub.add_flag("--fresh", flags.fresh, described("Do not go on with an earlier session"))
      ->group("How to search");
  CLI::Option* survey =
      group
          .add(
              "--survey", flags.survey, "N",
              "Do not search: measure N random points, or all where there are no more, and say how "
              "well the model predicts them")
          ->check(range(1, 100000));
  for (const char* of_searches : {"--budget", "--candidates", "--fresh"}) {
    survey->excludes(sub.get_option(of_searches));
  }
  group.add("--json", flags.json, "FILE.json", "Write all figures; see docs/tuning.md");
  group.add("--plot", flags.plot, "FILE.svg",
            "Draw the last direction of a survey, predicted over measured");
}

}  // namespace

void add_tune(CLI::App& app, Invocation& invocation) {
  CLI::App* sub = app.add_subcommand(
      "tune", "Search the fastest schedule of a layer, by model and measurement, and remember it");
  const auto flags = std::make_shared<Flags>();
  add_what_options(*sub, *flags);
  add_how_options(*sub, *flags);
  sub->footer(
      "Examples:\n"
      "  uniep tune --shape small --ranks 2 --budget 30\n"
      "  uniep tune --shape deepseek-v3 --backend cuda --ranks 4 --skew 1\n"
      "  uniep tune --shape small --survey 100 --plot model.svg\n"
      "\n"
      "Ctrl-C ends the search with what it has; the same command goes on from there. What is found "
      "is stored in UNIEP_TUNE_CACHE, where --schedule auto looks.\n"
      "Exits with 0; with 1 where a schedule gave wrong bits, a pass fails or the result cannot be "
      "stored; with 2 where arguments, or the cache, cannot be used.");
  sub->callback([flags, &invocation] { invocation.exit_code = run(*flags, invocation); });
}

}  // namespace uniep::tool
