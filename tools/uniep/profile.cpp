#include <iostream>
#include <memory>

#include "base/check.h"
#include "commands.h"
#include "machine.h"
#include "measure_profile.h"
#include "options.h"
#include "output_files.h"
#include "progress.h"
#include "table.h"

namespace uniep::tool {
namespace {

using enum Table::Align;

struct Flags {
  std::string backend = "cpu";
  std::string output;
  double effort = 1;
};

void print(const tune::MachineProfile& profile) {
  Notes notes;
  notes.add("machine", profile.device);
  notes.add("source", profile.source);
  notes.add("pass", cat(formatted("%.1f", 1e6 * profile.enter.fixed), " us, and ",
                        formatted("%.1f", 1e6 * profile.launch_s), " us a launch"));
  notes.add("link", profile.link.bytes_per_s == 0 ? "none" : link_text());
  std::cout << notes << "#\n# a core's time for a tile of 64 x 128, summed over 256 and 1024\n";
  Table table({kLeft, kRight, kRight, kRight});
  table.header({"", "k=256", "k=1024", "k=1024"});
  table.header({"stage", "(us)", "(us)", "(GFLOP/s)"});
  for (const tune::GemmCost& c : profile.gemms) {
    const auto seconds = [&](double k) {
      constexpr double kM = 64, kN = 128;
      return c.fixed + c.per_mnk * kM * kN * k + c.per_mk * kM * k + c.per_nk * kN * k +
             c.per_mn * kM * kN;
    };
    table.row({name(c.stage), formatted("%.1f", 1e6 * seconds(256)),
               formatted("%.1f", 1e6 * seconds(1024)),
               formatted("%.1f", 2e-9 * 64 * 128 * 1024 / seconds(1024))});
  }
  std::cout << table;
}

int run(const Flags& flags) {
  require(
      backend_choice(flags.backend) == Backend::kCpu, ErrorCode::kUnsupported,
      "GPUs cannot be profiled yet; --backend cpu is accepted, and uniep simulate has a shipped "
      "profile, h200");
  require_writable("--output", flags.output);
  tune::MachineProfile profile;
  {
    Progress progress("measuring", profile_steps());
    profile = measure_cpu_profile(flags.effort, [&] { progress.advance(); });
  }
  print(profile);
  if (!flags.output.empty()) {
    write_text(flags.output, [&](std::ostream& out) { out << tune::profile_to_json(profile); });
  }
  return kExitOk;
}

}  // namespace

void add_profile(CLI::App& app, Invocation& invocation) {
  CLI::App* sub = app.add_subcommand(
      "profile", "Measure what tasks cost on this machine, for uniep simulate and uniep tune");
  const auto flags = std::make_shared<Flags>();
  OptionGroup group(*sub, "What to measure");
  group.add("--backend", flags->backend, "NAME", "cpu (default); GPUs cannot be profiled yet")
      ->check(one_of({"cpu", "cuda"}));
  group.add("--output", flags->output, "FILE.json",
            "Write the profile; docs/tuning.md describes the file");
  group
      .add("--effort", flags->effort, "X",
           "Repetitions, as a multiple of the usual number: 0.1 to 10 (default 1, some ten "
           "seconds)")
      ->check(range(0.1, 10.0));
  sub->footer("Example:\n  uniep profile --output here.json");
  sub->callback([flags, &invocation] { invocation.exit_code = run(*flags); });
}

}  // namespace uniep::tool
