#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>

#include "base/check.h"
#include "base/files.h"
#include "base/utc_now.h"
#include "bench/bench_against.h"
#include "bench/bench_report.h"
#include "bench/bench_run.h"
#include "bench/bench_size.h"
#include "bench/bench_summary.h"
#include "bench/device_ranks.h"
#include "commands.h"
#include "common/choices.h"
#include "common/interrupt.h"
#include "common/machine.h"
#include "common/options.h"
#include "common/output_files.h"
#include "common/table.h"

namespace uniep::tool {
namespace {

/// The command line as it was given; empty lists and 0 ranks stand for defaults.
struct Flags {
  std::string backend = "auto";
  int ranks = 0;
  int hosts = 0;
  std::vector<std::string> shapes;
  std::string input;
  std::vector<std::string> schedules{"single"};
  std::string pass = "both";
  int iterations = 15;
  int warmup = 3;
  std::uint64_t seed = 0;
  double skew = 0;
  bool no_check = false;
  KeptFlags kept;
  ArithmeticFlags arithmetic;
  std::string json;
  std::string against;
  std::optional<double> fail_above;
};

bool wants_cuda(const Flags& flags) { return backend_choice(flags.backend) == Backend::kCuda; }

/// The shapes to make up; none if a file has the layer.
std::vector<std::string> shapes_of(const Flags& flags) {
  if (!flags.shapes.empty() || !flags.input.empty()) return flags.shapes;
  return wants_cuda(flags) ? workload::model_names() : std::vector<std::string>{"tiny", "small"};
}

BenchOptions bench_options(const Flags& flags, int ranks) {
  BenchOptions options{.ranks = ranks,
                       .hosts = std::max(flags.hosts, 1),
                       .schedules = {},
                       .passes = pass_choice(flags.pass),
                       .iterations = flags.iterations,
                       .warmup = flags.warmup,
                       .check = !flags.no_check};
  for (const std::string& text : flags.schedules) {
    options.schedules.push_back({text, schedule_choice(text, backend_choice(flags.backend))});
  }
  return options;
}

/// Everything that can be refused is refused before the first shape is measured.
std::vector<BenchCase> make_cases(const Flags& flags, const BenchOptions& options) {
  std::vector<BenchCase> cases;
  // Results, and those to compare with.
  const int results = options.check ? 2 : 1;
  const RankLayout layout = layout_of_hosts(options.ranks, options.hosts);
  if (!flags.input.empty()) {
    cases.push_back(read_case(flags.input, options.ranks, flags.arithmetic));
    require_dy(cases.back(), options.passes);
    if (!wants_cuda(flags)) {
      require_measurable("--input " + display_name(flags.input), cases.back().spec, layout,
                         results);
    }
  }
  for (const std::string& shape : shapes_of(flags)) {
    const workload::ShapeSpec spec = parse_bench_shape(shape, options.ranks, flags.arithmetic);
    if (!wants_cuda(flags)) require_measurable("--shape " + shape, spec, layout, results);
    cases.push_back(make_case(shape, options.ranks, flags.seed, flags.skew, flags.arithmetic));
  }
  for (BenchCase& bench : cases) {
    flags.kept.apply_to(bench.problem);
    bench.hosts = options.hosts;
    for (const BenchSchedule& s : options.schedules) {
      if (s.schedule) validate(*s.schedule, bench.problem);
    }
  }
  return cases;
}

BenchHeader header_of(const Flags& flags, const std::string& command, const Ranks& ranks,
                      const std::vector<BenchCase>& cases) {
  return {.build = this_build(),
          .backend = name(ranks.backend),
          .machine = ranks.machine,
          .date = utc_now(),
          .command = command,
          .link = link_text_of(ranks),
          .sharing = ranks.sharing,
          .no_floor = ranks.no_floor,
          .input = flags.input,
          .save = flags.kept.save,
          .recompute_h = flags.kept.recompute_h,
          .backward_rows = flags.kept.backward_rows,
          .seed = flags.seed,
          .skew = flags.input.empty() ? flags.skew : cases.front().skew};
}

/// Prints what an earlier file says of the same cases, and notes it in the new one.
BenchComparison compare(const ResultFile& earlier, Json& file) {
  const BenchComparison comparison =
      compare_results(earlier, result_file_of(file, "what was measured"));
  print_comparison(std::cout, comparison);
  file["against"] = comparison_json(comparison);
  return comparison;
}

bool is_too_slow(const Flags& flags, const BenchComparison& comparison) {
  if (!flags.fail_above) return false;
  if (comparison.cases.empty()) {
    std::cout << comment("FAILED: no case is in both, so nothing was compared (--fail-above)");
    return true;
  }
  const std::size_t slower = comparison.slower_than(*flags.fail_above);
  std::cout << comment(cat(slower == 0 ? "ok: " : "FAILED: ", slower, " of ",
                           comparison.cases.size(), " are slower beyond noise by more than ",
                           *flags.fail_above, " % (--fail-above)"));
  return slower > 0;
}

int report(const Flags& flags, const BenchHeader& header, const BenchOptions& options,
           const std::vector<BenchEntry>& entries, std::size_t cases,
           const std::optional<ResultFile>& earlier) {
  Json file = bench_json(header, options, entries);
  const bool too_slow = earlier && is_too_slow(flags, compare(*earlier, file));
  if (!flags.json.empty()) write_json(flags.json, file);
  print_bench_verdict(std::cout, entries, options);
  const std::string fastest = fastest_text(entries, options);
  if (!fastest.empty()) std::cout << comment(fastest);
  const bool interrupted = was_interrupted(entries);
  if (interrupted) std::cout << comment(interrupted_text(entries, cases, options));
  if (all_wrong(entries).total() > 0) return kExitFailed;
  if (interrupted) return Interrupt::exit_code();
  return too_slow ? kExitFailed : kExitOk;
}

int run_on(const Flags& flags, const std::string& command, const Ranks& ranks,
           const std::optional<ResultFile>& earlier) {
  BenchOptions options = bench_options(flags, ranks.count);
  options.floors = ranks.sharing.empty();
  const std::vector<BenchCase> cases = make_cases(flags, options);
  const BenchHeader header = header_of(flags, command, ranks, cases);
  const Interrupt interrupt;
  if (ranks.speaks) print_bench_header(std::cout, header, options);
  const std::vector<BenchEntry> entries = measure_cases(cases, options, ranks);
  if (!ranks.speaks) return kExitOk;
  return report(flags, header, options, entries, cases.size(), earlier);
}

void require_usable(const Flags& flags) {
  std::vector<NamedFile> inputs = tuned_files();
  inputs.push_back({"--input", flags.input});
  inputs.push_back({"--against", flags.against});
  require_usable_outputs({{"--json", flags.json}}, inputs);
  require(flags.input.empty() || flags.shapes.empty(), ErrorCode::kInvalidArgument,
          "--input and --shape name two layers; one of them is accepted");
  require(!flags.fail_above || !flags.against.empty(), ErrorCode::kInvalidArgument,
          "--fail-above is about an earlier result; it is accepted with --against FILE.json");
  require(!flags.fail_above || flags.iterations >= kFewestPasses, ErrorCode::kInvalidArgument,
          "--iterations is ", flags.iterations, ", whose noise --fail-above cannot tell; ",
          kFewestPasses, " or more are accepted with it");
}

int run(const Flags& flags, const Invocation& invocation) {
  require_usable(flags);
  std::optional<ResultFile> earlier;
  if (!flags.against.empty()) earlier = read_result_file(flags.against);
  const auto refuse = [&](int ranks) {
    for (const std::string& shape : shapes_of(flags)) {
      parse_bench_shape(shape, ranks, flags.arithmetic);
    }
    (void)bench_options(flags, ranks);
  };
  return with_ranks(
      {backend_choice(flags.backend), flags.ranks, flags.hosts}, invocation, refuse,
      [&](const Ranks& ranks) { return run_on(flags, invocation.command, ranks, earlier); });
}

void add_what_options(CLI::App& sub, Flags& flags) {
  OptionGroup group(sub, "What to measure");
  CLI::Option* shape =
      group.add("--shape", flags.shapes, "NAME[,key=value...]",
                "Layers to make up (default: tiny small; with cuda: every model). Names: " +
                    shapes_and_keys());
  CLI::Option* input = group.add(
      "--input", flags.input, "FILE",
      "Or a layer file as uniep run takes it: its tokens, routing, probabilities and weights");
  group.add("--schedule", flags.schedules, "PRESET|key=value,...",
            "Schedules to measure side by side, as in uniep run (default: single); auto is looked "
            "up for each shape");
  add_pass(group, flags.pass);
  add_kept(group, flags.kept);
  add_arithmetic(group, flags.arithmetic, shape);
  add_seed(group, flags.seed)->excludes(input);
  add_skew(group, flags.skew)->excludes(input);
}

void add_how_options(CLI::App& sub, Flags& flags) {
  OptionGroup group(sub, "How to measure it");
  add_backend(group, flags.backend);
  group
      .add("--ranks", flags.ranks, "N",
           cat("Ranks, ", ranks_accepted(), " (default: ", kDefaultCpuRanks,
               "; with cuda: every GPU)"))
      ->check(a_number_of_ranks());
  add_hosts(group, flags.hosts, "Default: 1");
  group.add("--iterations", flags.iterations, "N", "Measured passes (default 15)")
      ->check(range(1, 1000000));
  group.add("--warmup", flags.warmup, "N", "Passes before these (default 3)")
      ->check(range(0, 1000000));
  group.add_flag("--no-check", flags.no_check,
                 "Do not compare results with schedule sequential and with float64");
  add_json(group, flags.json);
}

void add_compare_options(CLI::App& sub, Flags& flags) {
  OptionGroup group(sub, "What to compare it with");
  group.add("--against", flags.against, "EARLIER.json",
            "A file that --json wrote: prints new time over old for each layer, direction and "
            "schedule, and which changes are larger than noise");
  group
      .add("--fail-above", flags.fail_above, "PERCENT",
           "Exit with 1 where one is slower than there by more than this and by more than noise")
      ->check(range(0.0, 1e6));
}

}  // namespace

void add_bench(CLI::App& app, Invocation& invocation) {
  CLI::App* sub =
      add_command(app, "bench", "Measure passes and stages, and what they could be at best");
  const auto flags = std::make_shared<Flags>();
  add_what_options(*sub, *flags);
  add_how_options(*sub, *flags);
  add_compare_options(*sub, *flags);
  sub->footer(
      "Examples:\n"
      "  uniep bench\n"
      "  uniep bench --shape small,tokens=1024 --schedule sequential single auto --ranks 4\n"
      "  uniep bench --input data/moe_lm_layer.safetensors --schedule sequential single\n"
      "  uniep bench --ranks 4 --hosts 2 --combine-groups 2\n"
      "  uniep bench --backend cuda --ranks 4 --json bench.json\n"
      "  uniep bench --backend cuda --shape gpt-oss-120b --as-model --schedule auto\n"
      "  uniep bench --json new.json --against old.json --fail-above 5\n"
      "\n"
      "Ctrl-C ends it with what it has. Exits with 0; with 1 where results are wrong, a "
      "pass fails or --fail-above says so; with 2 where arguments or files cannot be "
      "used; with 130 or 143 where a signal ended it.");
  sub->callback([flags, &invocation] { invocation.exit_code = run(*flags, invocation); });
}

}  // namespace uniep::tool
