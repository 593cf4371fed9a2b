#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>

#include "base/check.h"
#include "base/env.h"
#include "base/rank_limits.h"
#include "base/utc_now.h"
#include "bench/bench_case.h"
#include "commands.h"
#include "common/choices.h"
#include "common/interrupt.h"
#include "common/layer_memory.h"
#include "common/machine.h"
#include "common/options.h"
#include "common/output_files.h"
#include "common/progress.h"
#include "common/record_json.h"
#include "common/table.h"
#include "plan/routing_fault.h"
#include "profile/profiles.h"
#include "schedule/constraints.h"
#include "simulate/hosts_report.h"
#include "simulate/memory_options.h"
#include "simulate/memory_plan.h"
#include "simulate/memory_report.h"
#include "simulate/scaling_plot.h"
#include "simulate/simulation_size.h"
#include "tune/model/cost_model.h"

namespace uniep::tool {
namespace {

using enum Table::Align;

struct Flags {
  std::string shape;
  int ranks = 8;
  std::string profile = "h200";
  int gpus_per_node = 0;
  int hosts = 0;
  double nic_gbps = 0;
  std::optional<double> nic_latency_us;
  std::optional<int> spare_sms;
  std::string schedule = "single";
  std::string pass = "both";
  std::uint64_t seed = 0;
  double skew = 0;
  KeptFlags kept;
  ArithmeticFlags arithmetic;
  MemoryFlags memory;
  std::string json;
  std::string plot;
};

struct Setting {
  tune::MachineProfile profile;
  tune::Topology topology;
  Schedule schedule;
  std::vector<Pass> passes;
};

/// What is predicted of one number of ranks.
struct Degree {
  int ranks = 1;
  bool one_stands_for_all = false;
  std::int64_t fullest_rows = 0;
  std::int64_t layer_bytes = 0;
  std::int64_t weight_bytes = 0;
  /// The capacity of the real layer, if nothing sets Problem::capacity_rows.
  std::int64_t default_capacity = 0;
  RoutingFault overflow{};  ///< what that layer would refuse
  std::vector<tune::Prediction> passes{};
};

double nic_latency_us(const Flags& flags) { return flags.nic_latency_us.value_or(5); }

/// UNIEP_SPARE_SMS of GPUs on several hosts, as docs/hosts.md advises.
constexpr int kUsualSpareSms = 16;

/// --hosts is a cluster by itself, of --ranks alone.
void take_hosts(Flags& flags) {
  require(flags.hosts > 0 || !flags.spare_sms, ErrorCode::kInvalidArgument, "--spare-sms is ",
          flags.spare_sms.value_or(0), "; it is accepted with --hosts");
  if (flags.hosts == 0) return;
  require(
      flags.gpus_per_node == 0 && !flags.memory.memory_gb && flags.plot.empty() &&
          flags.arithmetic.combine_groups == 1 &&
          flags.arithmetic.combine_partials == name(CombinePartials::kFp32) &&
          flags.arithmetic.shared_experts == 0,
      ErrorCode::kInvalidArgument,
      "--hosts prints a table of ways to exchange rows between hosts, some with combine groups; "
      "it is accepted without --gpus-per-node, --memory, --combine-groups, --combine-partials, "
      "--shared-experts and --plot");
  require(flags.nic_gbps > 0, ErrorCode::kInvalidArgument, "--hosts is ", flags.hosts,
          ", but there are no NICs between them; it is accepted with --nic-gbps");
  flags.gpus_per_node = layout_of_hosts(flags.ranks, flags.hosts).local_ranks;
}

void require_whole_cluster(const Flags& flags) {
  require((flags.gpus_per_node > 0) == (flags.nic_gbps > 0), ErrorCode::kInvalidArgument,
          "--gpus-per-node and --nic-gbps describe a cluster together; both or neither are "
          "accepted");
  require(!flags.nic_latency_us || flags.nic_gbps > 0, ErrorCode::kInvalidArgument,
          "--nic-latency-us is ", flags.nic_latency_us.value_or(0),
          ", but there are no NICs; it is accepted with --gpus-per-node and --nic-gbps");
}

Setting setting_of(const Flags& flags) {
  require_whole_cluster(flags);
  Setting s{.profile = find_profile(flags.profile), .topology = {}, .schedule = {}, .passes = {}};
  s.topology = {.ranks_per_node = flags.gpus_per_node,
                .nic_bytes_per_s = flags.nic_gbps * 1e9 / 8,
                .nic_latency_s = nic_latency_us(flags) * 1e-6};
  s.schedule = parse_schedule(flags.schedule, default_schedule(s.profile.backend));
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    if (measures(pass_choice(flags.pass), pass)) s.passes.push_back(pass);
  }
  return s;
}

/// 1, 2, 4, ... up to `most` and `most` itself, as far as they divide the experts.
std::vector<int> degrees_up_to(int most, int num_experts) {
  std::vector<int> degrees;
  for (int ranks = 1; ranks < most; ranks *= 2) {
    if (num_experts % ranks == 0) degrees.push_back(ranks);
  }
  degrees.push_back(most);
  return degrees;
}

bool is_overflow(const RoutingFault& fault) { return fault.kind != RoutingFault::Kind::kNone; }

/// The rank that gets the most rows, pad rows included, where they exceed the default capacity.
RoutingFault overflow_of(const BenchCase& bench, std::int64_t capacity) {
  RoutingFault fault;
  for (int rank = 0; rank < bench.ranks; ++rank) {
    const std::int64_t rows = bench.padded_rows(rank);
    if (rows <= std::max(capacity, fault.value)) continue;
    fault.kind = RoutingFault::Kind::kCapacity;
    fault.rank = rank;
    fault.value = rows;
  }
  return fault;
}

void note_overflow(Degree& degree, const BenchCase& bench) {
  Problem usual = bench.problem;
  usual.capacity_rows = 0;
  degree.default_capacity = capacity_rows(usual, bench.ranks);
  degree.overflow = overflow_of(bench, degree.default_capacity);
}

/// Throws unless the schedule can run on the profile's workers without `spare` ones.
void require_runnable(const BenchCase& bench, const Setting& setting, int spare = 0) {
  const auto reason = invalid_reason(setting.schedule, bench.problem,
                                     {setting.profile.backend, setting.profile.workers - spare});
  require(!reason, ErrorCode::kInvalidArgument, reason.value_or(""));
}

std::vector<RoutingPlan> plans_of(const BenchCase& bench, const Setting& setting) {
  require_runnable(bench, setting);
  return tune::plans_to_simulate(bench.problem, bench.tokens_per_rank(), bench.routing.topk_ids);
}

Degree predict_degree(const Flags& flags, const Setting& setting, int ranks) {
  BenchCase bench = make_case(flags.shape, ranks, flags.seed, flags.skew, flags.arithmetic);
  flags.kept.apply_to(bench.problem);
  const auto plans = plans_of(bench, setting);
  Degree degree{.ranks = ranks, .one_stands_for_all = static_cast<int>(plans.size()) < ranks};
  for (const RoutingPlan& plan : plans) {
    degree.fullest_rows = std::max(degree.fullest_rows, plan.traffic().rows);
  }
  note_overflow(degree, bench);
  degree.layer_bytes = layer_memory(bench.problem, ranks);
  degree.weight_bytes =
      weight_parameters(bench.problem, ranks) * static_cast<std::int64_t>(sizeof(bf16));
  for (const Pass pass : setting.passes) {
    degree.passes.push_back(tune::predict(plans, pass, setting.schedule, setting.profile,
                                          {.topology = setting.topology}));
  }
  return degree;
}

double predict_layer(const BenchCase& bench, const Setting& setting) {
  const auto plans = plans_of(bench, setting);
  double seconds = 0;
  for (const Pass pass : setting.passes) {
    seconds += tune::simulate(plans, pass, setting.schedule, setting.profile,
                              {.topology = setting.topology})
                   .seconds;
  }
  return seconds;
}

MemoryPlan plan_degree(const Flags& flags, const Setting& setting, const ModelMemory& model,
                       int ranks) {
  BenchCase bench = make_case(flags.shape, ranks, flags.seed, flags.skew, flags.arithmetic);
  bench.problem.backward_rows = flags.kept.backward_rows;  // the rest is what the plan tries
  MemoryPlan plan = plan_memory(
      bench, model, [&](const BenchCase& choice) { return predict_layer(choice, setting); });
  plan.one_stands_for_all = ranks > tune::kMostSimulatedRanks;
  return plan;
}

/// One thing after another, each of which takes about `weight_of` it, as far as it is not
/// interrupted.
template <class Thing, class Weight, class Predict>
auto predict_each(const std::vector<Thing>& things, Weight&& weight_of, Predict&& predict) {
  std::int64_t total = 0;
  for (const Thing& thing : things) total += weight_of(thing);
  Progress progress("simulating", total);
  std::vector<decltype(predict(things[0]))> predictions;
  for (const Thing& thing : things) {
    if (Interrupt::requested()) break;
    predictions.push_back(predict(thing));
    progress.advance(weight_of(thing));
  }
  return predictions;
}

template <class Predict>
auto predict_degrees(const std::vector<int>& ranks, Predict&& predict) {
  return predict_each(
      ranks, [](int count) { return count; }, predict);
}

std::string topology_text(const Flags& flags) {
  if (flags.gpus_per_node == 0) return "one node";
  return cat(flags.gpus_per_node, " GPUs a node, ", flags.nic_gbps, " Gbit/s and ",
             nic_latency_us(flags), " us a NIC, one NIC a GPU");
}

Notes header(const Flags& flags, const Setting& setting) {
  Notes notes;
  notes.add("uniep", to_string(this_build()));
  notes.add("profile", cat(setting.profile.name, " (", setting.profile.device, ")"));
  notes.add("source", setting.profile.source);
  const workload::ShapeSpec spec = parse_bench_shape(flags.shape, 1, flags.arithmetic);
  notes.add("shape", cat(workload::to_string(spec), "; seed=", flags.seed, ", skew=", flags.skew));
  const std::string arithmetic = arithmetic_text(workload::problem_of(spec));
  if (!arithmetic.empty()) notes.add("experts", arithmetic);
  notes.add("cluster", topology_text(flags));
  notes.add("schedule", to_string(setting.schedule));
  return notes;
}

void print_header(const Flags& flags, const Setting& setting) {
  std::cout << header(flags, setting)
            << "#\n# predicted, not measured. exposed: what communication adds to the time under "
               "this schedule;\n# memory: of one rank, by uniep itself (docs/cli.md: uniep info "
               "--shape); weights: w1 and w2\n"
            << std::flush;
}

bool has_stand_ins(const std::vector<Degree>& degrees) {
  return std::ranges::any_of(degrees, &Degree::one_stands_for_all);
}

void print_table(const Setting& setting, const std::vector<Degree>& degrees) {
  std::vector<Table::Align> align(4, kRight);
  std::vector<std::string> top{"", "rows of", "memory", "weights"};
  std::vector<std::string> header{"ranks", "fullest", "(GB)", "(GB)"};
  for (const Pass pass : setting.passes) {
    align.insert(align.end(), {kRight, kRight, kRight});
    top.insert(top.end(), {name(pass), "exposed", ""});
    header.insert(header.end(), {"(ms)", "(ms)", "(%)"});
  }
  Table table(align);
  table.header(top);
  table.header(header);
  const auto gb = [](std::int64_t bytes) {
    return formatted("%.2f", static_cast<double>(bytes) * 1e-9);
  };
  for (const Degree& d : degrees) {
    std::vector<std::string> cells{cat(d.ranks), cat(d.fullest_rows), gb(d.layer_bytes),
                                   gb(d.weight_bytes)};
    for (const tune::Prediction& p : d.passes) {
      cells.push_back(milliseconds(p.seconds()));
      cells.push_back(milliseconds(p.exposed_s()));
      cells.push_back(formatted("%.1f", 100 * p.exposed_s() / p.seconds()));
    }
    table.row(cells);
  }
  std::cout << table;
  if (has_stand_ins(degrees)) {
    std::cout << "# above " << tune::kMostSimulatedRanks
              << " ranks the fullest one stands for all of them\n";
  }
}

Json overflow_json(const RoutingFault& fault) {
  if (!is_overflow(fault)) return nullptr;
  return {{"rank", fault.rank}, {"rows", fault.value}};
}

/// Warns of the smallest number of ranks that overflows; the rest is in the file.
void warn_of_overflow(const std::vector<Degree>& degrees) {
  const auto overflows = [](const Degree& d) { return is_overflow(d.overflow); };
  const auto first = std::ranges::find_if(degrees, overflows);
  if (first == degrees.end()) return;
  const auto others = std::count_if(first + 1, degrees.end(), overflows);
  std::cerr << "uniep simulate: warning: at " << first->ranks << " ranks this routing brings rank "
            << first->overflow.rank << ' ' << first->overflow.value
            << " rows (padding included), and by default a rank has room for "
            << first->default_capacity
            << ": the real layer would refuse it; capacity_rows=" << first->overflow.value
            << " would do"
            << (others == 0 ? ""
                            : cat(" (",
                                  counted(others, "more number of ranks overflows",
                                          "more numbers of ranks overflow"),
                                  ")"))
            << '\n';
}

Json file_head(const char* schema, const Flags& flags, const Invocation& invocation,
               const Setting& setting, bool interrupted) {
  return {
      {"schema", schema},
      {"version", this_build().version},
      {"commit", this_build().commit},
      {"date", utc_now()},
      {"command", invocation.command},
      {"profile", setting.profile.name},
      {"cluster", topology_text(flags)},
      {"seed", flags.seed},
      {"skew", flags.skew},
      {"arithmetic",
       arithmetic_words(workload::problem_of(parse_bench_shape(flags.shape, 1, flags.arithmetic)))},
      {"interrupted", interrupted}};
}

void write_file(const Flags& flags, const Invocation& invocation, const Setting& setting,
                const std::vector<Degree>& degrees, bool interrupted) {
  Json records = Json::array();
  for (const Degree& d : degrees) {
    for (std::size_t i = 0; i < setting.passes.size(); ++i) {
      records.push_back({{"shape", flags.shape},
                         {"ranks", d.ranks},
                         {"direction", name(setting.passes[i])},
                         {"schedule", to_string(setting.schedule)},
                         {"predicted_ms", 1e3 * d.passes[i].seconds()},
                         {"exposed_ms", 1e3 * d.passes[i].exposed_s()},
                         {"fullest_rows", d.fullest_rows},
                         {"memory_bytes", d.layer_bytes},
                         {"weight_bytes", d.weight_bytes},
                         {"one_stands_for_all", d.one_stands_for_all},
                         {"default_capacity_rows", d.default_capacity},
                         {"overflow", overflow_json(d.overflow)}});
    }
  }
  Json file = file_head("uniep-simulate-1", flags, invocation, setting, interrupted);
  file["records"] = std::move(records);
  write_json(flags.json, file);
}

std::vector<std::string> picture_notes(const Flags& flags, const Invocation& invocation,
                                       const Setting& setting, const std::vector<Degree>& degrees) {
  const workload::ShapeSpec spec = parse_bench_shape(flags.shape, 1, flags.arithmetic);
  const std::string arithmetic = arithmetic_text(workload::problem_of(spec));
  return {
      cat(spec.tokens, " tokens a rank, hidden ", spec.hidden, ", intermediate ", spec.intermediate,
          ", ", spec.num_experts, " experts, top-", spec.topk, arithmetic.empty() ? "" : ", ",
          arithmetic, "; seed ", flags.seed, ", skew ", flags.skew),
      cat("profile ", setting.profile.name, " (", setting.profile.device,
          "); cluster: ", topology_text(flags)),
      cat("predicted, not measured, by uniep ", to_string(this_build()), ", ", utc_now(),
          has_stand_ins(degrees) ? cat("; above ", tune::kMostSimulatedRanks,
                                       " ranks the fullest one stands for all of them")
                                 : ""),
      invocation.command};
}

void write_picture(const Flags& flags, const Invocation& invocation, const Setting& setting,
                   const std::vector<Degree>& degrees) {
  ScalingInput picture{.page = {.title = cat(workload::parse_shape(flags.shape).name,
                                             ": predicted time of a pass over ranks"),
                                .notes = picture_notes(flags, invocation, setting, degrees),
                                .schedule = to_string(setting.schedule)},
                       .ranks = {},
                       .curves = {},
                       .gpus_per_node = flags.gpus_per_node,
                       .between_nodes = cat("a NIC of ", flags.nic_gbps, " Gbit/s a GPU")};
  for (const Degree& d : degrees) picture.ranks.push_back(d.ranks);
  for (std::size_t i = 0; i < setting.passes.size(); ++i) {
    ScalingCurve curve{.name = name(setting.passes[i]), .seconds = {}, .exposed = {}};
    for (const Degree& d : degrees) {
      curve.seconds.push_back(d.passes[i].seconds());
      curve.exposed.push_back(d.passes[i].exposed_s());
    }
    picture.curves.push_back(std::move(curve));
  }
  write_text(flags.plot, [&](std::ostream& out) { out << draw_scaling(picture); });
}

constexpr char kNumbersOfRanks[] = "numbers of ranks";

int report_end(std::size_t done, std::size_t asked_for, const char* of) {
  if (done == asked_for) return kExitOk;
  std::cout << comment(cat("interrupted after ", done, " of ", asked_for, ' ', of));
  return Interrupt::exit_code();
}

int run_prediction(const Flags& flags, const Invocation& invocation, const Setting& setting,
                   const std::vector<int>& ranks) {
  print_header(flags, setting);
  const std::vector<Degree> degrees =
      predict_degrees(ranks, [&](int count) { return predict_degree(flags, setting, count); });
  print_table(setting, degrees);
  std::cout << std::flush;
  warn_of_overflow(degrees);
  const int exit_code = report_end(degrees.size(), ranks.size(), kNumbersOfRanks);
  if (!flags.json.empty()) {
    write_file(flags, invocation, setting, degrees, degrees.size() < ranks.size());
  }
  if (!flags.plot.empty() && !degrees.empty()) {
    write_picture(flags, invocation, setting, degrees);
  }
  return exit_code;
}

/// Ranks that are simulated of a group on several hosts.
int simulated_of_hosts(const Flags& flags) {
  return flags.ranks <= kMostRanksOfHosts ? flags.ranks : flags.gpus_per_node;
}

int run_hosts(const Flags& flags, const Invocation& invocation, const Setting& setting) {
  BenchCase bench = make_case(flags.shape, flags.ranks, flags.seed, flags.skew, flags.arithmetic);
  flags.kept.apply_to(bench.problem);
  const std::vector<HostWay> all = ways_between(flags.hosts, setting.profile.backend);
  const int spare = flags.spare_sms.value_or(kUsualSpareSms);
  const bool in_waves = std::ranges::any_of(all, &HostWay::in_waves);
  require_runnable(bench, setting, in_waves ? spare : 0);
  std::cout << header(flags, setting)
            << "#\n# predicted, not measured. exposed: what communication adds to the time under "
               "this schedule; wire: what\n# a NIC takes for all that crosses, and no schedule is "
               "faster; bytes of an average rank.\n"
            << explained_ways(flags.hosts, setting.profile.backend)
            << (simulated_of_hosts(flags) < flags.ranks ? "# one host stands for all\n" : "")
            << std::flush;
  const HostSetting of_ways{.hosts = flags.hosts,
                            .spare_sms = spare,
                            .schedule = setting.schedule,
                            .topology = setting.topology,
                            .profile = setting.profile};
  const std::vector<HostWay> ways = predict_each(
      all, [](const HostWay&) { return 1; },
      [&](HostWay way) {
        way.passes = predict_way(way, bench, setting.passes, of_ways);
        return way;
      });
  const double nic = setting.topology.nic_bytes_per_s;
  print_ways(std::cout, ways, setting.passes, nic);
  std::cout << std::flush;
  Degree degree{.ranks = flags.ranks};
  note_overflow(degree, bench);
  warn_of_overflow({degree});
  const int exit_code = report_end(ways.size(), all.size(), "ways");
  if (flags.json.empty()) return exit_code;
  Json file = file_head("uniep-hosts-1", flags, invocation, setting, ways.size() < all.size());
  file["records"] = ways_json(ways, setting.passes, nic,
                              {{"shape", flags.shape},
                               {"ranks", flags.ranks},
                               {"hosts", flags.hosts},
                               {"schedule", to_string(setting.schedule)}});
  write_json(flags.json, file);
  return exit_code;
}

int run_plan(const Flags& flags, const Invocation& invocation, const Setting& setting,
             const std::vector<int>& ranks, const ModelMemory& model) {
  Notes notes = header(flags, setting);
  notes.add("model", model_text(model));
  std::cout << notes;
  print_plan_legend(std::cout);
  std::cout << std::flush;
  const std::vector<MemoryPlan> plans =
      predict_degrees(ranks, [&](int count) { return plan_degree(flags, setting, model, count); });
  for (const MemoryPlan& plan : plans) print_plan(std::cout, plan, model);
  const int exit_code = report_end(plans.size(), ranks.size(), kNumbersOfRanks);
  if (flags.json.empty()) return exit_code;
  Json file =
      file_head("uniep-memory-plan-1", flags, invocation, setting, plans.size() < ranks.size());
  file["shape"] = flags.shape;
  file["schedule"] = to_string(setting.schedule);
  file.update(model_json(model));
  file["plans"] = plans_json(plans, model);
  write_json(flags.json, file);
  return exit_code;
}

int run(Flags flags, const CLI::App& sub, const Invocation& invocation) {
  take_hosts(flags);
  const std::optional<ModelMemory> model = model_memory(flags.memory);
  if (model) require_undecided(sub, {"--plot"});
  require_usable_outputs({{"--json", flags.json}, {"--plot", flags.plot}},
                         {profile_file("--profile", flags.profile)});
  const Setting setting = setting_of(flags);
  const workload::ShapeSpec spec = parse_bench_shape(flags.shape, flags.ranks, flags.arithmetic);
  const std::vector<int> ranks = degrees_up_to(flags.ranks, spec.num_experts);
  const Interrupt interrupt;
  if (flags.hosts > 0) {
    require_simulable(spec, flags.ranks, setting.schedule, simulated_of_hosts(flags));
    return run_hosts(flags, invocation, setting);
  }
  for (const int count : ranks) {
    require_simulable(spec, count, setting.schedule,
                      count <= tune::kMostSimulatedRanks ? count : 1);
  }
  return model ? run_plan(flags, invocation, setting, ranks, *model)
               : run_prediction(flags, invocation, setting, ranks);
}

CLI::Validator a_simulated_number() { return range(1, kMaxMadeUpRanks); }

void add_what_options(CLI::App& sub, Flags& flags) {
  OptionGroup group(sub, "What to predict");
  CLI::Option* shape =
      group
          .add("--shape", flags.shape, "NAME[,key=value...]",
               "Layer; its tokens are those of one rank. Names: " + shapes_and_keys())
          ->required();
  group
      .add("--ranks", flags.ranks, "N",
           cat("Largest number of ranks, 1 to ", kMaxMadeUpRanks,
               " (default 8): 1, 2, 4, ... up to it are predicted"))
      ->check(a_simulated_number());
  group.add("--schedule", flags.schedule, "PRESET|key=value,...",
            "As in uniep run (default: single)");
  group.add("--pass", flags.pass, "DIRECTION", "forward, backward or both (default)")
      ->check(one_of({"forward", "backward", "both"}));
  group.add("--seed", flags.seed, "S", "Seed of the routing (default 0)")->check(a_seed());
  group
      .add("--skew", flags.skew, "Z",
           "How unevenly experts are loaded, 0 to 100: 0 (default) evenly, 1 like Zipf's law")
      ->check(a_skew());
  add_kept(group, flags.kept);
  add_arithmetic(group, flags.arithmetic, shape);
}

void add_where_options(CLI::App& sub, Flags& flags) {
  OptionGroup group(sub, "On which machine");
  group.add("--profile", flags.profile, "FILE|NAME",
            "What `uniep profile` wrote, or a shipped one: " + shipped_profile_names() +
                " (default: h200)");
  group
      .add("--gpus-per-node", flags.gpus_per_node, "N",
           "GPUs that the profile's link connects (default: all); the rest are reached by NICs")
      ->check(a_simulated_number());
  group
      .add("--hosts", flags.hosts, "N",
           "Cut --ranks into N equal hosts instead, and compare ways to exchange tokens and rows "
           "between them; with --nic-gbps")
      ->check(a_simulated_number());
  group
      .add("--spare-sms", flags.spare_sms, "N",
           cat("With --hosts, of GPUs: UNIEP_SPARE_SMS of what is gathered in waves (default ",
               kUsualSpareSms, ")"))
      ->check(range(0, kMostSpareSms));
  group
      .add("--nic-gbps", flags.nic_gbps, "GBIT",
           "Speed of a GPU's NIC in each direction, in 1e9 bits/s")
      ->check(range(0.001, 1e6));
  group
      .add("--nic-latency-us", flags.nic_latency_us, "US",
           "Latency of a transfer through NICs (default 5); with --nic-gbps")
      ->check(range(0.0, 1e6));
  group.add("--json", flags.json, "FILE.json", "Write the predictions; see docs/results.md");
  group.add("--plot", flags.plot, "FILE.svg", "Draw time and exposed communication over ranks");
}

}  // namespace

void add_simulate(CLI::App& app, Invocation& invocation) {
  CLI::App* sub =
      add_command(app, "simulate",
                  "Predict time, exposed communication and memory of machines that are not here");
  const auto flags = std::make_shared<Flags>();
  add_what_options(*sub, *flags);
  add_memory_options(*sub, flags->memory,
                     "Plan instead: which choices of --save, --recompute-h and exact_rows fit a "
                     "rank that has so many 1e9 bytes for its MoE layers; with --layers");
  add_where_options(*sub, *flags);
  sub->footer(
      "Examples:\n"
      "  uniep simulate --shape deepseek-v3 --ranks 8\n"
      "  uniep simulate --shape deepseek-v3 --ranks 64 --gpus-per-node 8 --nic-gbps 400 --plot "
      "scaling.svg\n"
      "  uniep simulate --shape deepseek-v3 --ranks 16 --hosts 2 --nic-gbps 400\n"
      "  uniep simulate --shape qwen3-30b --ranks 4 --schedule two-kernel,dispatch_workers=24 "
      "--skew 1\n"
      "  uniep simulate --shape deepseek-v3 --ranks 8 --memory 80 --layers 4 --in-flight 4");
  sub->callback(
      [flags, sub, &invocation] { invocation.exit_code = run(*flags, *sub, invocation); });
}

}  // namespace uniep::tool
