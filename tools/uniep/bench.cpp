#include <iostream>
#include <memory>

#include "base/check.h"
#include "bench_rank.h"
#include "bench_report.h"
#include "commands.h"
#include "machine.h"
#include "options.h"
#include "output_files.h"
#include "progress.h"
#include "ranks.h"

namespace uniep::tool {
namespace {

/// The command line as it was given; empty lists and 0 ranks stand for defaults.
struct Flags {
  std::string backend = "auto";
  int ranks = 0;
  std::vector<std::string> shapes;
  std::vector<std::string> schedules{"single"};
  std::string pass = "both";
  int iterations = 15;
  int warmup = 3;
  std::uint64_t seed = 0;
  double skew = 0;
  bool no_check = false;
  std::string json;
};

bool wants_cuda(const Flags& flags) { return backend_choice(flags.backend) == Backend::kCuda; }

std::vector<std::string> shapes_of(const Flags& flags) {
  if (!flags.shapes.empty()) return flags.shapes;
  return wants_cuda(flags) ? workload::model_names() : std::vector<std::string>{"tiny", "small"};
}

BenchOptions bench_options(const Flags& flags, int ranks) {
  BenchOptions options{.ranks = ranks,
                       .schedules = {},
                       .passes = pass_choice(flags.pass),
                       .iterations = flags.iterations,
                       .warmup = flags.warmup,
                       .check = !flags.no_check};
  for (const std::string& text : flags.schedules) {
    options.schedules.push_back(schedule_choice(text, backend_choice(flags.backend)));
  }
  return options;
}

BenchEntry measure(const BenchCase& bench, const BenchOptions& options, const Ranks& ranks) {
  BenchEntry entry{.bench = bench, .report = {}};
  const Progress progress("measuring " + bench.name, 0);
  ranks.run([&](Communicator& member, BenchDevice& device) {
    BenchReport report = run_bench(entry.bench, options, member, device);
    if (member.rank() == 0) entry.report = std::move(report);
  });
  return entry;
}

/// Everything that can be refused is refused before the first shape is measured.
std::vector<BenchCase> make_cases(const Flags& flags, const BenchOptions& options) {
  std::vector<BenchCase> cases;
  for (const std::string& shape : shapes_of(flags)) {
    const workload::ShapeSpec spec = parse_bench_shape(shape, options.ranks);
    // Inputs, results, and those to compare with.
    if (!wants_cuda(flags)) require_memory(spec, options.ranks, options.check ? 3 : 2);
    cases.push_back(make_case(shape, options.ranks, flags.seed, flags.skew));
    for (const auto& schedule : options.schedules) {
      if (schedule) validate(*schedule, cases.back().problem);
    }
  }
  return cases;
}

int run_on(const Flags& flags, const std::string& command, const Ranks& ranks) {
  BenchOptions options = bench_options(flags, ranks.count);
  options.floors = ranks.sharing.empty();
  const std::vector<BenchCase> cases = make_cases(flags, options);
  const BenchHeader header{.build = this_build(),
                           .backend = name(ranks.backend),
                           .machine = ranks.machine,
                           .date = utc_now(),
                           .command = command,
                           .link = wants_cuda(flags) ? "" : link_text(),
                           .sharing = ranks.sharing,
                           .no_floor = ranks.no_floor,
                           .seed = flags.seed,
                           .skew = flags.skew};
  if (ranks.speaks) print_bench_header(std::cout, header, options);
  std::vector<BenchEntry> entries;
  for (const BenchCase& bench : cases) {
    entries.push_back(measure(bench, options, ranks));
    if (ranks.speaks) print_bench(std::cout, entries.back(), options);
  }
  if (!ranks.speaks) return kExitOk;
  if (!flags.json.empty()) write_bench(flags.json, header, options, entries);
  print_bench_verdict(std::cout, entries, options);
  return all_wrong(entries).total() == 0 ? kExitOk : kExitFailed;
}

int run(const Flags& flags, const Invocation& invocation) {
  require_usable_outputs({{"--json", flags.json}}, tuned_files());
  const auto refuse = [&](int ranks) {
    for (const std::string& shape : shapes_of(flags)) parse_bench_shape(shape, ranks);
    (void)bench_options(flags, ranks);
  };
  return with_ranks(backend_choice(flags.backend), flags.ranks, invocation, refuse,
                    [&](const Ranks& ranks) { return run_on(flags, invocation.command, ranks); });
}

void add_what_options(CLI::App& sub, Flags& flags) {
  OptionGroup group(sub, "What to measure");
  group.add("--shape", flags.shapes, "NAME[,key=value...]",
            "Layers to make up (default: tiny small; with cuda: every model). Names: " +
                shapes_and_keys());
  group.add("--schedule", flags.schedules, "PRESET|key=value,...",
            "Schedules to measure side by side, as in uniep run (default: single); auto is looked "
            "up for each shape");
  add_pass(group, flags.pass);
  add_seed(group, flags.seed);
  add_skew(group, flags.skew);
}

void add_how_options(CLI::App& sub, Flags& flags) {
  OptionGroup group(sub, "How to measure it");
  add_backend(group, flags.backend);
  group
      .add("--ranks", flags.ranks, "N",
           cat("Ranks, 1 to 64 (default: ", kDefaultCpuRanks, "; with cuda: every GPU)"))
      ->check(range(1, 64));
  group.add("--iterations", flags.iterations, "N", "Measured passes (default 15)")
      ->check(range(1, 1000000));
  group.add("--warmup", flags.warmup, "N", "Passes before these (default 3)")
      ->check(range(0, 1000000));
  sub.add_flag("--no-check", flags.no_check,
               described("Do not compare results with schedule sequential and with float64"))
      ->group("How to measure it");
  add_json(group, flags.json);
}

}  // namespace

void add_bench(CLI::App& app, Invocation& invocation) {
  CLI::App* sub =
      app.add_subcommand("bench", "Measure passes and stages, and what they could be at best");
  const auto flags = std::make_shared<Flags>();
  add_what_options(*sub, *flags);
  add_how_options(*sub, *flags);
  sub->footer(
      "Examples:\n"
      "  uniep bench\n"
      "  uniep bench --shape small,tokens=1024 --schedule sequential single auto --ranks 4\n"
      "  uniep bench --backend cuda --ranks 4 --json bench.json\n"
      "\n"
      "Exits with 0; with 1 where results are wrong or a pass fails; with 2 where arguments or "
      "files cannot be used.");
  sub->callback([flags, &invocation] { invocation.exit_code = run(*flags, invocation); });
}

}  // namespace uniep::tool
