#include <algorithm>
#include <memory>
#include <optional>

#include "base/check.h"
#include "base/env.h"
#include "base/files.h"
#include "bench/bench_size.h"
#include "commands.h"
#include "common/choices.h"
#include "common/interrupt.h"
#include "common/options.h"
#include "common/output_files.h"
#include "common/progress.h"
#include "common/table.h"
#include "common/work_limits.h"
#include "profile/measure_profile.h"
#include "profile/profiles.h"
#include "simulate/memory_options.h"
#include "tune/book/schedule_book.h"
#include "tune/book/tune_key.h"
#include "tune/lab/lab_network.h"
#include "tune/model/cost_model.h"
#include "tuning/least_budget.h"
#include "tuning/tune_memory.h"
#include "tuning/tune_run.h"

namespace uniep::tool {
namespace {

/// The profile that the flag names; nothing for "none", and where "auto" knows none.
std::optional<tune::MachineProfile> profile_of(const TuneFlags& flags, const Ranks& ranks) {
  if (flags.profile == "none") return std::nullopt;
  if (flags.profile != "auto") {
    const tune::MachineProfile named = find_profile(flags.profile);
    require(named.backend == ranks.backend, ErrorCode::kInvalidArgument, "profile ", named.name,
            " is of backend ", name(named.backend), "; one of backend ", name(ranks.backend),
            " is accepted");
    return ranks.backend == Backend::kCpu ? with_emulated_link(named)
                                          : tune::with_spare_workers(named, env_spare_sms());
  }
  if (ranks.backend == Backend::kCuda) {
    return tune::profile_of_passes(ranks.backend, tune::device_name(ranks.backend));
  }
  constexpr double kEffort = 0.3;
  Progress progress("measuring this machine", profile_steps());
  return measure_cpu_profile(kEffort, [&] { progress.advance(); }).profile;
}

/// The settings, but for what is known of the machine.
tune::TuneSettings settings_of(const TuneFlags& flags) {
  tune::TuneSettings s;
  s.budget_s = flags.budget;
  s.candidates = static_cast<std::size_t>(flags.candidates);
  s.restriction = flags.space;
  s.cache = tune::TuneCache::default_path();
  s.resume = !flags.fresh;
  s.watch.stop = Interrupt::requested;
  return s;
}

void require_model_of_survey(const TuneFlags& flags, bool is_known) {
  require(flags.survey == 0 || is_known, ErrorCode::kInvalidArgument,
          "a survey compares the model with measurements and needs a profile; --profile FILE|NAME "
          "is accepted");
}

void learn_machine(tune::TuneSettings& settings, const TuneFlags& flags, const Ranks& ranks) {
  settings.profile = profile_of(flags, ranks);
  require_model_of_survey(flags, settings.profile.has_value());
  if (!settings.profile || ranks.hosts == 1) return;
  settings.topology = tune::measure_network(layout_of_hosts(ranks.count, ranks.hosts).local_ranks);
}

/// A model's memory, where the fastest choice that fits it is asked for.
std::optional<ModelMemory> memory_of(const TuneFlags& flags, const CLI::App& sub) {
  const std::optional<ModelMemory> model = model_memory(flags.memory);
  if (model) require_undecided(sub, {"--survey"});
  return model;
}

void require_usable(const TuneFlags& flags) {
  std::vector<NamedFile> inputs = tuned_files();
  inputs.push_back({"--input", flags.input});
  inputs.push_back(profile_file("--profile", flags.profile));
  require_usable_outputs({{"--json", flags.json}, {"--plot", flags.plot}}, inputs);
  require_model_of_survey(flags, flags.profile != "none");
  require(flags.plot.empty() || flags.survey > 0, ErrorCode::kInvalidArgument,
          "--plot draws a survey; --survey N is needed");
  require(flags.input.empty() != flags.shape.empty(), ErrorCode::kInvalidArgument,
          flags.input.empty() ? "no layer to tune for" : "two layers to tune for",
          "; either --input FILE or --shape NAME[,key=value...] is accepted");
}

// Results, and those to compare with.
constexpr int kResults = 2;

/// What can be refused before ranks are started.
void refuse(const TuneFlags& flags, Backend backend, int ranks) {
  refuse_sharing("uniep tune", backend, ranks);
  if (!flags.shape.empty()) {
    const workload::ShapeSpec spec = parse_bench_shape(flags.shape, ranks, flags.arithmetic);
    if (backend == Backend::kCpu) {
      const RankLayout layout = layout_of_hosts(ranks, std::max(flags.hosts, 1));
      require_measurable("--shape " + flags.shape, spec, layout, kResults);
      require_least_budget(flags, spec, ranks);
    }
    require_routable(spec, ranks);
  }
  Space(Problem{}, Pass::kForward, {backend, 0}).restrict_to(flags.space);
  if (flags.survey == 0) tune::TuneCache(tune::TuneCache::default_path()).require_storable();
}

BenchCase case_of(const TuneFlags& flags, const Ranks& ranks) {
  if (!flags.shape.empty()) {
    BenchCase made_up =
        make_case(flags.shape, ranks.count, flags.seed, flags.skew, flags.arithmetic);
    flags.kept.apply_to(made_up.problem);
    made_up.hosts = ranks.hosts;
    return made_up;
  }
  BenchCase bench = read_case(flags.input, ranks.count, flags.arithmetic);
  flags.kept.apply_to(bench.problem);
  bench.hosts = ranks.hosts;
  require_dy(bench, pass_choice(flags.pass));
  if (ranks.backend == Backend::kCpu) {
    require_measurable("--input " + display_name(flags.input), bench.spec,
                       layout_of_hosts(ranks.count, ranks.hosts), kResults);
    require_least_budget(flags, bench.spec, ranks.count);
  }
  return bench;
}

int run(const TuneFlags& flags, const CLI::App& sub, const Invocation& invocation) {
  const std::optional<ModelMemory> model = memory_of(flags, sub);
  require_usable(flags);
  const Backend backend = backend_choice(flags.backend);
  return with_ranks(
      {backend, flags.ranks, flags.hosts}, invocation,
      [&](int ranks) { refuse(flags, backend, ranks); },
      [&](const Ranks& ranks) {
        refuse_sharing("uniep tune", ranks);
        const BenchCase bench = case_of(flags, ranks);
        tune::TuneSettings settings = settings_of(flags);
        if (!model) require_budget_of_a_round(flags, bench, settings, ranks);
        learn_machine(settings, flags, ranks);
        const TuneCall call{flags, invocation, ranks, settings, bench};
        const Interrupt interrupt;
        if (ranks.speaks) print_tune_header(call);
        if (model) return run_memory_tuning(call, *model);
        return flags.survey > 0 ? run_survey(call) : run_tuning(call);
      });
}

void add_what_options(CLI::App& sub, TuneFlags& flags) {
  OptionGroup group(sub, "What to tune (one of --shape and --input)");
  CLI::Option* shape =
      group.add("--shape", flags.shape, "NAME[,key=value...]",
                "Layer to make up, tokens of one rank. Names: " + shapes_and_keys());
  CLI::Option* input = group.add(
      "--input", flags.input, "FILE",
      "Or a layer file as uniep run takes it: its tokens, routing, probabilities and weights");
  group
      .add("--ranks", flags.ranks, "N",
           cat("Ranks, ", ranks_accepted(), " (default: ", kDefaultCpuRanks,
               "; with cuda: every GPU)"))
      ->check(a_number_of_ranks());
  add_hosts(group, flags.hosts, "Default: 1");
  group
      .add("--backend", flags.backend, "NAME",
           "cpu (default), or cuda: a process for each GPU, as in uniep bench")
      ->check(one_of({"cpu", "cuda"}));
  group
      .add("--pass", flags.pass, "DIRECTION", "forward, backward or both (default), each by itself")
      ->check(one_of({"forward", "backward", "both"}));
  add_seed(group, flags.seed)->excludes(input);
  add_skew(group, flags.skew)->excludes(input);
  add_kept(group, flags.kept);
  add_arithmetic(group, flags.arithmetic, shape);
}

void add_how_options(CLI::App& sub, TuneFlags& flags) {
  OptionGroup group(sub, "How to search");
  group
      .add("--budget", flags.budget, "SECONDS",
           "Time for each direction (and choice), 0.1 to 86400 (default 60)")
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
  group.add_flag("--fresh", flags.fresh, "Do not go on with an earlier session");
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
  group.add("--json", flags.json, "FILE.json", "Write all figures; see docs/results.md");
  group.add("--plot", flags.plot, "FILE.svg",
            "Draw the last direction of a survey, predicted over measured");
}

}  // namespace

void add_tune(CLI::App& app, Invocation& invocation) {
  CLI::App* sub = add_command(
      app, "tune",
      "Search the fastest schedule of a layer, by model and measurement, and remember it");
  const auto flags = std::make_shared<TuneFlags>();
  add_what_options(*sub, *flags);
  add_memory_options(*sub, flags->memory,
                     "Search for each choice of --save, --recompute-h and exact_rows with which a "
                     "model's MoE layers fit a rank that has so many 1e9 bytes for them, and say "
                     "which is the fastest; with --layers");
  add_how_options(*sub, *flags);
  sub->footer(
      "Examples:\n"
      "  uniep tune --shape small --ranks 2 --budget 30\n"
      "  uniep tune --shape small --ranks 4 --hosts 2 --combine-groups 2\n"
      "  uniep tune --shape deepseek-v3 --backend cuda --ranks 4 --skew 1\n"
      "  uniep tune --input data/moe_lm_layer.safetensors --ranks 2\n"
      "  uniep tune --shape small --survey 100 --plot model.svg\n"
      "  uniep tune --shape qwen3-30b --backend cuda --memory 40 --layers 12\n"
      "\n"
      "Ctrl-C ends the search with what it has; the same command resumes from there. "
      "What is found is stored in UNIEP_TUNE_CACHE, where --schedule auto looks.\n"
      "Exits with 0; with 1 where a schedule gave wrong bits, a pass fails or the result "
      "cannot be stored; with 2 where arguments, or the cache, cannot be used; with 130 "
      "or 143 where a signal ended it.");
  sub->callback(
      [flags, sub, &invocation] { invocation.exit_code = run(*flags, *sub, invocation); });
}

}  // namespace uniep::tool
