#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>

#include "base/check.h"
#include "bench/device_ranks.h"
#include "commands.h"
#include "common/choices.h"
#include "common/options.h"
#include "common/output_files.h"
#include "common/progress.h"
#include "profile/measure_profile.h"
#include "profile/profile_report.h"
#include "profile/profiles.h"
#ifdef UNIEP_HAS_CUDA
#include "profile/measure_cuda_profile.h"
#endif

namespace uniep::tool {
namespace {

struct Flags {
  std::string backend = "cpu";
  int ranks = 0;
  std::string output;
  std::string like;
  double effort = 1;
};

/// The profile that has what is not measured, where one is named.
std::optional<tune::MachineProfile> like_of(const Flags& flags) {
  if (flags.like.empty()) return std::nullopt;
  const tune::MachineProfile like = find_profile(flags.like);
  require(like.backend == Backend::kCuda, ErrorCode::kInvalidArgument, "--like ", flags.like,
          ", which is of backend ", name(like.backend), "; one of backend cuda is accepted");
  return like;
}

void report(const tune::MeasuredProfile& measured, const Flags& flags) {
  print_profile(measured);
  if (flags.output.empty()) return;
  write_text(flags.output,
             [&](std::ostream& out) { out << tune::profile_to_json(measured.profile); });
}

int profile_cpu(const Flags& flags) {
  require(flags.ranks <= 1, ErrorCode::kInvalidArgument, "--ranks ", flags.ranks,
          " with --backend cpu; the CPU is measured with 1 rank, whose cores all ranks share");
  require(flags.like.empty(), ErrorCode::kInvalidArgument, "--like ", flags.like,
          " with --backend cpu, where all is measured; it needs --backend cuda");
  tune::MeasuredProfile measured;
  {
    Progress progress("measuring", profile_steps());
    measured = measure_cpu_profile(flags.effort, [&] { progress.advance(); });
  }
  report(measured, flags);
  return kExitOk;
}

#ifdef UNIEP_HAS_CUDA
tune::MeasuredProfile profile_group(const Communicator& member, BenchDevice& device,
                                    const Flags& flags,
                                    const std::optional<tune::MachineProfile>& like) {
  constexpr int kRepeats = 3;
  std::optional<Progress> progress;
  if (member.rank() == 0) progress.emplace("measuring", tune::lab_profile_steps(member.size()));
  tune::LabOptions options;
  options.repeats = std::max(1, static_cast<int>(kRepeats * flags.effort));
  options.progress = [&] {
    if (progress) progress->advance();
  };
  return measure_cuda_profile(member, device, options, like);
}
#endif

int profile_cuda(const Flags& flags, const Invocation& invocation) {
  const std::optional<tune::MachineProfile> like = like_of(flags);
  return with_ranks(
      {.backend = Backend::kCuda, .count = flags.ranks}, invocation,
      [](int ranks) { refuse_sharing("uniep profile", Backend::kCuda, ranks); },
      [&](const Ranks& ranks) {
        refuse_sharing("uniep profile", ranks);
#ifdef UNIEP_HAS_CUDA
        ranks.run([&](Communicator& member, BenchDevice& device) {
          const tune::MeasuredProfile measured = profile_group(member, device, flags, like);
          if (ranks.speaks) report(measured, flags);
        });
#else
        (void)ranks;
        (void)like;
#endif
        return int{kExitOk};
      });
}

int run(const Flags& flags, const Invocation& invocation) {
  require_usable_outputs({{"--output", flags.output}}, {profile_file("--like", flags.like)});
  return backend_choice(flags.backend) == Backend::kCuda ? profile_cuda(flags, invocation)
                                                         : profile_cpu(flags);
}

}  // namespace

void add_profile(CLI::App& app, Invocation& invocation) {
  CLI::App* sub = add_command(
      app, "profile", "Measure what tasks cost on this machine, for uniep simulate and uniep tune");
  const auto flags = std::make_shared<Flags>();
  OptionGroup group(*sub, "What to measure");
  group
      .add("--backend", flags->backend, "NAME",
           "cpu (default), or cuda: a process for each GPU, as in uniep bench")
      ->check(one_of({"cpu", "cuda"}));
  group
      .add("--ranks", flags->ranks, "N",
           cat("GPUs, ", ranks_accepted(),
               " (default: all). One has no link to measure: see --like"))
      ->check(a_number_of_ranks());
  group.add("--like", flags->like, "FILE|NAME",
            "The profile that has what is not measured of GPUs: what few tasks cost, and one GPU's "
            "link (default: the shipped profile of theirs)");
  group.add("--output", flags->output, "FILE.json",
            "Write the profile; docs/tuning.md describes the file");
  group
      .add("--effort", flags->effort, "X",
           "Repetitions, as a multiple of the usual number: 0.1 to 10 (default 1, some ten "
           "seconds on the CPU, about a minute on GPUs)")
      ->check(range(0.1, 10.0));
  sub->footer(
      "Examples:\n  uniep profile --output here.json\n  uniep profile --backend cuda --ranks 4 "
      "--output gpus.json");
  sub->callback([flags, &invocation] { invocation.exit_code = run(*flags, invocation); });
}

}  // namespace uniep::tool
