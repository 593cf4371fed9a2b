#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

#include "base/check.h"
#include "base/env.h"
#include "base/files.h"
#include "base/math.h"
#include "base/rank_limits.h"
#include "base/utc_now.h"
#include "commands.h"
#include "common/arithmetic.h"
#include "common/choices.h"
#include "common/interrupt.h"
#include "common/launcher.h"
#include "common/layer_memory.h"
#include "common/machine.h"
#include "common/options.h"
#include "common/output_files.h"
#include "common/progress.h"
#include "common/ranks.h"
#include "common/table.h"
#include "common/work_limits.h"
#include "group/communicator_impl.h"
#include "group/process_environment.h"
#include "io/layer_file.h"
#include "run/pictures.h"
#include "run/result_check.h"
#include "run/results_json.h"
#include "run/step.h"
#include "run/summary.h"
#include "tune/book/auto_schedule.h"
#include "uniep/rank_layout.h"
#include "workload/skew.h"
#include "workload/split.h"
#include "workload/synthetic.h"
#ifdef UNIEP_HAS_CUDA
#include "group/cuda/cuda_communicator.h"
#include "run/cuda_step.h"
#endif

namespace uniep::tool {
namespace {

/// The command line as it was given.
struct Flags {
  std::string backend = "auto";
  int ranks = 0;  ///< 0: not given, one, or those that a launcher has started
  int hosts = 0;
  bool processes = false;
  std::string input;
  std::string shape;
  std::uint64_t seed = 0;
  double skew = 0;
  double dropped = 0;
  std::string schedule = kAutoSchedule;
  std::string pass = "both";
  std::string main_grad = "bf16";
  bool defer_weights = false;
  std::int64_t capacity = 0;
  KeptFlags kept;
  std::int64_t row_pool = 0;
  ArithmeticFlags arithmetic;
  int repeat = 1;
  bool check = false;
  std::string save_input;
  std::string output;
  std::string trace;
  std::string plot;
  std::string json;
};

/// The number of ranks if no launcher says how many there are.
int own_ranks(const Flags& flags) { return std::max(flags.ranks, 1); }

bool wants_cuda(const Flags& flags) { return backend_choice(flags.backend) == Backend::kCuda; }

void require_weight_gradients(const Flags& flags, bool asked, const std::string& option) {
  require(!asked || pass_choice(flags.pass) != PassChoice::kForward, ErrorCode::kInvalidArgument,
          option,
          " is about weight gradients, which --pass forward has none of; --pass backward "
          "or both is accepted with it");
}

void require_usable(const Flags& flags) {
#ifndef UNIEP_HAS_CUDA
  require(!wants_cuda(flags), ErrorCode::kUnsupported,
          "this build has no CUDA backend; --backend cpu is accepted");
#endif
  require(!flags.processes || !wants_cuda(flags), ErrorCode::kInvalidArgument,
          "--processes is about CPU ranks, and with --backend cuda every rank is a process; "
          "--backend cpu is accepted with it");
  require_hosts(backend_choice(flags.backend), flags.hosts);
  require(flags.input.empty() != flags.shape.empty(), ErrorCode::kInvalidArgument,
          flags.input.empty() ? "no layer to run" : "two layers to run",
          "; either --input FILE or --shape NAME[,key=value...] is accepted");
  require_weight_gradients(flags, flags.defer_weights, "--defer-weights");
  require(!flags.defer_weights || flags.kept.backward_rows == 0, ErrorCode::kInvalidArgument,
          "--defer-weights keeps all rows between its two calls, and --backward-rows is ",
          flags.kept.backward_rows, "; one of them is accepted");
  require_weight_gradients(flags, flags.main_grad == "fp32", "--main-grad fp32");
  std::vector<NamedFile> inputs = tuned_files();
  inputs.push_back({"--input", flags.input});
  require_usable_outputs({{"--save-input", flags.save_input},
                          {"--output", flags.output},
                          {"--trace", flags.trace},
                          {"--plot", flags.plot},
                          {"--json", flags.json}},
                         inputs);
}

StepOptions step_options(const Flags& flags) {
  const Backend backend = backend_choice(flags.backend);
  return {.ranks = own_ranks(flags),
          .hosts = std::max(flags.hosts, 1),
          .schedule = schedule_choice(flags.schedule, backend).value_or(default_schedule(backend)),
          .capacity_rows = flags.capacity,
          .kept = flags.kept,
          .row_pool = flags.row_pool,
          .passes = pass_choice(flags.pass),
          .main_grad = flags.main_grad == "fp32",
          .defer_weights = flags.defer_weights,
          .repeat = flags.repeat,
          .record_timeline = !flags.trace.empty() || !flags.plot.empty()};
}

/// How a backend runs steps: with all ranks, and with one for comparison. Of several processes only
/// the one that `speaks` prints, checks and writes files.
struct Runners {
  StepRunner all_ranks;
  StepRunner one_rank;
  bool speaks = true;
  int processes = 1;      ///< of this host that each hold the layer
  std::string devices{};  ///< that they run on, beside the machine's CPUs; empty: none
  std::string sharing{};  ///< why times mean nothing; empty: ranks share no GPUs
  /// What rank 0 chooses, on all ranks.
  std::function<tune::LayerSchedules(const std::function<tune::LayerSchedules()>&)> agree =
      [](const auto& choose) { return choose(); };
};

/// What the library holds of a balanced load, on all ranks: a row that no token fills takes no
/// memory.
double bytes_of_library(const Flags& flags, const workload::ShapeSpec& spec, int ranks) {
  if (wants_cuda(flags)) return 0;              // it lies on GPUs
  if (spec.num_experts % ranks != 0) return 0;  // no layer, as will be said
  Problem problem = workload::problem_of(spec, std::max<std::int64_t>(1, spec.tokens * spec.topk));
  flags.kept.apply_to(problem);
  // A number that does not divide the ranks is reported elsewhere.
  const int hosts = flags.hosts > 0 && ranks % flags.hosts == 0 ? flags.hosts : 1;
  const double bytes = static_cast<double>(layer_memory(problem, ranks, hosts));
  return ranks * (bytes + static_cast<double>(flags.row_pool));
}

/// Throws Error(kCapacity) where steps of the layer, or their check, would take for ever or more
/// memory than is free. `copies` of the layer are yet to be had, by this process and its peers.
void require_feasible(const Flags& flags, const std::string& what, const workload::ShapeSpec& spec,
                      int ranks, int copies) {
  const double of_copies = copies * static_cast<double>(workload::layer_bytes(spec, ranks));
  require_memory(what, ranks, of_copies + bytes_of_library(flags, spec, ranks));
  if (!wants_cuda(flags)) require_short_passes(what, spec, ranks);
  const bool backward = pass_choice(flags.pass) != PassChoice::kForward;
  if (flags.check) require_checkable(what, spec, ranks, backward);
}

workload::ShapeSpec shape_of(const Flags& flags) {
  workload::ShapeSpec spec = workload::parse_shape(flags.shape);
  spec.dropped = flags.dropped;
  flags.arithmetic.apply_to(spec);
  return spec;
}

/// How many results a run holds, each as large as the layer: that of the first step and that of the
/// last. Of a forward pass alone they are small.
int results_of(const Flags& flags) {
  return pass_choice(flags.pass) == PassChoice::kForward ? 0 : 2;
}

/// Throws unless `processes`, which each hold the layer, can run a shape that is given.
void require_feasible_shape(const Flags& flags, int ranks, int processes) {
  if (flags.shape.empty()) return;
  const workload::ShapeSpec spec = shape_of(flags);
  require_feasible(flags, "--shape " + flags.shape, spec, ranks,
                   processes * (1 + results_of(flags)));
  require_routable(spec, ranks);
}

/// The shape of a layer whose ranks each have as many tokens as the one with the most.
workload::ShapeSpec spec_of(const LayerData& layer, int ranks) {
  return {.name = "custom",
          .tokens = ceil_div<std::int64_t>(layer.tokens, ranks),
          .hidden = layer.hidden,
          .intermediate = layer.intermediate,
          .num_experts = layer.num_experts,
          .topk = layer.topk,
          .activation = layer.activation,
          .probs = layer.probs,
          .bias = layer.has_bias(),
          .combine_groups = layer.combine_groups,
          .combine_partials = layer.combine_partials,
          .shared_experts = layer.shared_experts,
          .shared_gate = !layer.shared_probs.empty()};
}

LayerData make_visibly(const Flags& flags, const workload::ShapeSpec& spec, int ranks,
                       bool speaks) {
  std::optional<Progress> progress;
  if (speaks) progress.emplace("making the layer up", 0);
  return workload::make_layer(spec, ranks, flags.seed, flags.skew);
}

LayerData read_or_make(const Flags& flags, const StepOptions& options, const Runners& runners,
                       RunHeader& header) {
  if (!flags.input.empty()) {
    header.shape = std::filesystem::path(flags.input).stem().string();
    header.input = flags.input;
    LayerData layer = read_layer(flags.input, flags.arithmetic);
    require_feasible(flags, "--input " + display_name(flags.input), spec_of(layer, options.ranks),
                     options.ranks, runners.processes * results_of(flags));
    return layer;
  }
  require_feasible_shape(flags, options.ranks, runners.processes);
  const workload::ShapeSpec spec = shape_of(flags);
  header.shape = flags.shape;
  header.made_up = true;
  header.input =
      cat("made up (", workload::to_string(spec), ", seed=", flags.seed, ", skew=", flags.skew,
          flags.dropped > 0 ? cat(", dropped=", flags.dropped) : "", ")");
  return make_visibly(flags, spec, options.ranks, runners.speaks);
}

void require_runnable(const Flags& flags, const LayerData& layer, const StepOptions& options) {
  const workload::Split split(layer, options.ranks);
  const Problem problem = layer_problem(split, options);
  validate(problem, options.ranks);
  validate(options.schedule, problem);
  const bool has_dy = !layer.dy.empty() || layer.tokens == 0;
  require(has_dy || options.passes == PassChoice::kForward, ErrorCode::kInvalidArgument,
          flags.input,
          " has no tensor dy, which a backward pass needs; --pass forward is accepted");
}

/// Writes the files that were asked for, and a line about each.
Notes write_files(const Flags& flags, const RunHeader& header, const LayerData& layer,
                  const StepOptions& options, const StepReport& report,
                  const std::vector<TensorCheck>& checks) {
  Notes notes;
  std::cout << std::flush;  // in this order, where an output is the standard output
  if (!flags.save_input.empty()) notes.add("layer", flags.save_input);
  if (!flags.output.empty()) {
    io::save_result(flags.output, report.result, layer);
    notes.add("tensors", flags.output);
  }
  if (!flags.json.empty()) {
    write_results(flags.json, header, layer, options, report, checks);
    notes.add("figures", flags.json);
  }
  if (!flags.trace.empty()) {
    write_trace(flags.trace, header, options, report);
    notes.add("timeline", flags.trace + " (open it in https://ui.perfetto.dev)");
  }
  if (!flags.plot.empty()) {
    write_plot(flags.plot, header, layer, options, report);
    notes.add("plot", flags.plot);
  }
  return notes;
}

/// What --schedule auto stands for.
void look_up_schedules(const Flags& flags, const LayerData& layer, const Runners& runners,
                       StepOptions& options) {
  const workload::Split split(layer, options.ranks);
  const tune::LayerSchedules found = runners.agree([&] {
    return tune::look_up_schedules(backend_choice(flags.backend), layer_problem(split, options),
                                   layout_of_hosts(options.ranks, options.hosts),
                                   flags.input.empty() ? flags.skew : workload::skew_of(layer));
  });
  options.schedule = found.forward.schedule;
  if (found.backward.schedule != options.schedule) {
    options.backward_schedule = found.backward.schedule;
  }
  options.schedule_origin = tune::origin_text(found);
}

/// The machine as `uniep bench` has it: the GPUs, then the machine that they are in.
Machine machine_of(const Runners& runners) {
  Machine machine = this_machine();
  if (!runners.devices.empty()) machine.cpu = cat(runners.devices, ", ", machine.cpu);
  return machine;
}

/// Nothing where it is interrupted.
std::optional<std::vector<TensorCheck>> check_until_interrupted(const Runners& runners,
                                                                const LayerData& layer,
                                                                const StepReport& report,
                                                                const StepOptions& options) {
  const Interrupt interrupt;
  try {
    return check_result(layer, report.result, options, runners.one_rank);
  } catch (const CheckInterrupted&) {
    return std::nullopt;
  }
}

/// Says first what is run: whoever has read that may interrupt it.
StepReport run_until_interrupted(const Runners& runners, const RunHeader& header,
                                 const LayerData& layer, const StepOptions& options) {
  const Interrupt interrupt;
  if (runners.speaks) print_header(std::cout, header, layer, options);
  return runners.all_ranks(layer, options);
}

std::string verdict_text(const Flags& flags, const StepReport& report,
                         const std::vector<TensorCheck>& checks) {
  if (report.interrupted) {
    return cat("interrupted after ", report.steps, " of ", counted(flags.repeat, "step", "steps"),
               "; not checked");
  }
  if (flags.check) return "check " + verdict(checks);
  return cat("done: ", flags.repeat + 1, " steps gave the same bits; not checked (--check)");
}

int run_layer(const Flags& flags, const std::string& command, StepOptions options,
              const Runners& runners) {
  RunHeader header{.build = this_build(),
                   .machine = machine_of(runners),
                   .date = utc_now(),
                   .command = command,
                   .shape = "",
                   .input = "",
                   .made_up = false,
                   .link = link_text(),
                   .sharing = runners.sharing};
  const LayerData layer = read_or_make(flags, options, runners, header);
  if (flags.schedule == kAutoSchedule) look_up_schedules(flags, layer, runners, options);
  require_runnable(flags, layer, options);

  // Ahead of the passes: with this file, one that fails can be repeated.
  if (runners.speaks && !flags.save_input.empty()) io::save_layer(flags.save_input, layer);
  StepReport report = run_until_interrupted(runners, header, layer, options);
  if (!runners.speaks) return kExitOk;
  print_figures(std::cout, report);

  std::vector<TensorCheck> checks;
  if (flags.check && !report.interrupted) {
    std::cout << std::flush;
    const auto checked = check_until_interrupted(runners, layer, report, options);
    report.interrupted = !checked;
    if (checked) print_checks(std::cout, checks = *checked);
  }
  Notes footer = write_files(flags, header, layer, options, report, checks);
  std::cout << "#\n" << comment(verdict_text(flags, report, checks)) << footer;
  if (report.interrupted) return Interrupt::exit_code();
  return all_ok(checks) ? kExitOk : kExitFailed;
}

std::function<tune::LayerSchedules(const std::function<tune::LayerSchedules()>&)> agreement_of(
    const Communicator& member) {
  return [member](const auto& choose) {
    return tune::agree_on_schedules(member.impl()->bootstrap(), member.rank(), env_timeout_ms(),
                                    tune::kLongestChoiceMs, "uniep run", choose);
  };
}

/// This process is a CPU rank of a group, or starts one and waits for it.
int run_processes(const Flags& flags, const Invocation& invocation) {
  // For this process, and for those that it starts.
  if (flags.hosts > 0) setenv("UNIEP_HOSTS", std::to_string(flags.hosts).c_str(), 1);
  if (!process_environment()) {
    const int ranks = own_ranks(flags);
    (void)layout_of_hosts(ranks, std::max(flags.hosts, 1));  // said once, not by each
    require_feasible_shape(flags, ranks, ranks);             // said once, not by each
    return launch_ranks(ranks, invocation.arguments);
  }
  StepOptions options = step_options(flags);
  const Communicator member = Communicator::cpu_from_environment();
  options.ranks = member.size();
  options.hosts = member.layout().hosts;
  int exit_code = kExitFailed;
  // What goes wrong here ends the other processes' waits, with its sentence.
  run_ranks({member}, [&](Communicator&) {
    exit_code = run_layer(
        flags, invocation.command, options,
        {.all_ranks = [&](const LayerData& layer,
                          const StepOptions& o) { return run_member_steps(layer, o, member); },
         .one_rank = run_steps,
         .speaks = member.rank() == 0,
         .processes = member.size(),
         .agree = agreement_of(member)});
  });
  return exit_code;
}

#ifdef UNIEP_HAS_CUDA
/// This process is a rank of a group, or starts one and waits for it.
int run_cuda(const Flags& flags, const Invocation& invocation) {
  StepOptions options = step_options(flags);
  if (!process_environment()) {
    const int ranks = own_ranks(flags);
    require_gpus(ranks);
    require_feasible_shape(flags, ranks, ranks);  // said once, not by each
    return launch_ranks(ranks, invocation.arguments);
  }
  const Communicator member = Communicator::cuda_from_environment();
  options.ranks = member.size();
  options.backend = name(Backend::kCuda);
  const auto steps_of = [](const Communicator& communicator) -> StepRunner {
    return [communicator](const LayerData& layer, const StepOptions& o) {
      return run_cuda_steps(layer, o, communicator);
    };
  };
  return run_layer(flags, invocation.command, options,
                   {.all_ranks = steps_of(member),
                    .one_rank = steps_of(cuda::single_rank()),
                    .speaks = member.rank() == 0,
                    .processes = member.size(),
                    .devices = gpus_text(member),
                    .sharing = sharing_of(member),
                    .agree = agreement_of(member)});
}
#endif

int run(const Flags& flags, const Invocation& invocation) {
  require_usable(flags);
  require_ranks_of_launcher(flags.ranks);
#ifdef UNIEP_HAS_CUDA
  if (wants_cuda(flags)) return run_cuda(flags, invocation);
#endif
  if (flags.processes || process_environment()) return run_processes(flags, invocation);
  const StepOptions options = step_options(flags);
  (void)layout_of_hosts(options.ranks, options.hosts);
  return run_layer(flags, invocation.command, options,
                   {.all_ranks = run_steps, .one_rank = run_steps});
}

void add_input_options(CLI::App& sub, Flags& flags) {
  OptionGroup group(sub, "Layer (one of --input and --shape)");
  group.add("--input", flags.input, "FILE",
            "Global batch and all experts: a safetensors file with x, topk_ids, topk_probs, w1, w2 "
            "and, for backward, dy");
  CLI::Option* shape = group.add("--shape", flags.shape, "NAME[,key=value...]",
                                 "Make a layer up. Names: " + shapes_and_keys());
  add_seed(group, flags.seed)->needs(shape);
  add_skew(group, flags.skew)->needs(shape);
  add_dropped(group, flags.dropped)->needs(shape);
  group.add("--save-input", flags.save_input, "FILE.safetensors",
            "Write the layer, before it is run; --input takes the file, with the same results");
}

void add_how_options(CLI::App& sub, Flags& flags) {
  OptionGroup group(sub, "How to run it");
  group
      .add("--ranks", flags.ranks, "N",
           cat("Ranks, 1 (default) to ", kMaxGroupRanks,
               ": groups of threads of this process, or processes (--processes, "
               "--backend cuda). Rank r gets tokens [r T/N, "
               "(r+1) T/N) and the r-th of N equal parts of the experts, which N must divide"))
      ->check(a_number_of_ranks());
  group.add_flag(
      "--processes", flags.processes,
      "Every CPU rank is a process, started by this one; memory is shared, and results are the "
      "same. Where RANK and its companions are set (torchrun), this process is a rank of that "
      "group, with or without the flag");
  add_hosts(group, flags.hosts,
            "Without it processes find out where they are, and threads are on one host");
  group.add(
      "--schedule", flags.schedule, "PRESET|key=value,...|auto",
      "A preset (sequential, pipelined:n, two-kernel, single), key=value pairs, or a preset "
      "and then pairs; keys that these leave alone have the backend's defaults. Or auto (default): "
      "what uniep tune found for this layer, else what is shipped or predicted best. "
      "`uniep info` lists presets and keys. Results do not depend on the schedule, not by a "
      "bit");
  add_pass(group, flags.pass);
  group
      .add("--main-grad", flags.main_grad, "TYPE",
           "Weight gradients: bf16 (default), or fp32, sums added to a main_grad that starts from "
           "zeros")
      ->check(one_of({"bf16", "fp32"}));
  group
      .add("--capacity", flags.capacity, "ROWS",
           "Rows that a rank has room for (default 0: enough for any routing of a small layer, "
           "twice the balanced load of a large one)")
      ->check(range<std::int64_t>(0, 2147483647));
  add_kept(group, flags.kept);
  group
      .add("--row-pool", flags.row_pool, "BYTES",
           "Forward keeps what it keeps in a row pool of so many bytes a rank, whose pages follow "
           "the rows that come; the results are the same, to the bit")
      ->check(range<std::int64_t>(1, std::int64_t{1} << 50));
  add_arithmetic(group, flags.arithmetic, sub.get_option("--shape"));
  group.add_flag(
      "--defer-weights", flags.defer_weights,
      "Leave the weight gradients to a call of their own, backward_weights, as pipeline-parallel "
      "schedules do; the figures are of both calls together");
  group.add("--repeat", flags.repeat, "N", "Measured steps (default 1), after one for warming up")
      ->check(range(1, 1000000));
  add_backend(group, flags.backend);
}

void add_result_options(CLI::App& sub, Flags& flags) {
  OptionGroup group(sub, "What to do with the results");
  group.add_flag(
      "--check", flags.check,
      "Compare every tensor bit by bit with schedule sequential at 1 rank, and with a float64 "
      "oracle; exit with 1 on any difference");
  group.add(
      "--output", flags.output, "FILE.safetensors",
      "Write out, dx, dprobs, dw1, dw2 (and db1, db2) in global order: the same bytes for any "
      "--ranks and --schedule; of shared experts also dshared_probs, and for each rank a part of "
      "dshared_w1 and dshared_w2");
  group.add("--trace", flags.trace, "FILE.json",
            "Write the last step's timeline for https://ui.perfetto.dev or chrome://tracing");
  group.add("--plot", flags.plot, "FILE.svg",
            "Draw the load per expert, the time per stage and the timeline of the last step");
  add_json(group, flags.json);
}

}  // namespace

void add_run(CLI::App& app, Invocation& invocation) {
  CLI::App* sub = add_command(
      app, "run", "Run one training step of an MoE layer, measure it, check it, picture it");
  const auto flags = std::make_shared<Flags>();
  add_input_options(*sub, *flags);
  add_how_options(*sub, *flags);
  add_result_options(*sub, *flags);
  sub->footer(
      "Examples:\n"
      "  uniep run --input data/moe_lm_layer.safetensors --ranks 4 --check\n"
      "  uniep run --shape tiny --ranks 2 --schedule pipelined:4,tile_m=32 --repeat 10\n"
      "  uniep run --shape small --skew 1 --ranks 4 --trace step.json --plot step.svg\n"
      "\n"
      "Exits with 0; with 1 where --check finds a difference or a pass fails; with 2 where "
      "arguments or files cannot be used.");
  sub->callback([flags, &invocation] { invocation.exit_code = run(*flags, invocation); });
}

}  // namespace uniep::tool
