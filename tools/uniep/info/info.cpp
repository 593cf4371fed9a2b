#include <iostream>
#include <memory>

#include "base/check.h"
#ifdef UNIEP_HAS_CUDA
#include "base/cuda/driver.h"
#endif
#include "base/env.h"
#include "commands.h"
#include "common/arithmetic.h"
#include "common/choices.h"
#include "common/environment.h"
#include "common/layer_memory.h"
#include "common/machine.h"
#include "common/options.h"
#include "common/table.h"
#include "cpu/kernels/kernels.h"
#include "info/graph_info.h"
#include "schedule/axes.h"
#include "uniep/schedule.h"

namespace uniep::tool {
namespace {

#ifdef UNIEP_HAS_CUDA
std::string backends() {
  return "cpu, cuda (Hopper GPUs; every preset, with tile_m=128 and tile_n=128 or 256)";
}

std::string gpus() {
  std::string list;
  for (int i = 0; i < cuda::device_count(); ++i) {
    const std::string problem = cuda::device_problem(i);
    list += (i == 0 ? "" : "; ") + (problem.empty() ? cuda::device_text(i) : problem);
  }
  return list.empty() ? "none" : list;
}
#else
std::string backends() { return "cpu; cuda: not in this build"; }
std::string gpus() { return "none usable by this build"; }
#endif

using enum Table::Align;

std::string axis_range(const AxisInfo& axis) {
  std::string text;
  for (const auto& choice : axis.choices) text += cat(text.empty() ? "" : "|", choice);
  if (text.empty()) text = cat(axis.min, "..", axis.max, axis.power_of_two ? " (2^n)" : "");
  return text;
}

/// The value on the backends: once, if they have the same.
std::string of_backends(const AxisInfo& axis, int cpu, int cuda) {
  const std::string on_cpu = axis_value_text(axis, cpu);
  return cpu == cuda ? on_cpu : cat(on_cpu, ", ", axis_value_text(axis, cuda));
}

std::string kernel_list() {
  std::string list;
  for (const auto isa : {cpu::Isa::kPortable, cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    const cpu::Kernels* kernels = cpu::kernels_for(isa);
    if (kernels != nullptr) list += cat(list.empty() ? "" : ", ", kernels->name);
  }
  return list;
}

void print_build() {
  const Build build = this_build();
  const Machine machine = this_machine();
  Notes notes;
  notes.add("version", build.version);
  notes.add("commit", build.commit.empty() ? "unknown" : build.commit);
  notes.add("build", build.type);
  notes.add("compiler", build.compiler);
  notes.add("sanitizer", build.sanitizer.empty() ? "none" : build.sanitizer);
  notes.add("backends", backends());
  notes.add("cpu", cat(machine.cpu, ", ", machine.cpus, machine.cpus == 1 ? " CPU" : " CPUs"));
  notes.add("kernels", cat(machine.isa, " (this machine can use: ", kernel_list(), ")"));
  notes.add("gpus", gpus());
  std::cout << notes;
}

void print_presets() {
  std::cout << "#\n# presets: uniep run --schedule PRESET[,key=value...]\n";
  for (const PresetInfo& preset : schedule_presets()) {
    std::cout << paragraph("  ", "      ", cat(preset.name, ": ", preset.meaning))
              << paragraph("      ", "      ", preset.sets);
  }
  std::cout << "# all other axes keep the defaults of the backend:\n";
  for (const Backend backend : {Backend::kCpu, Backend::kCuda}) {
    const std::string schedule = to_string(default_schedule(backend));
    std::cout << paragraph("  ", "      ", cat(name(backend), ": ", schedule));
  }
}

/// When a value is chosen.
const char* scope_text(const AxisInfo& axis) {
  return axis.scope == AxisScope::kCompileTime ? "compile" : "launch";
}

void print_axes() {
  std::cout << "#\n"
            << comment(
                   "schedule axes: no value changes a bit of a result; default and neutral: on "
                   "cpu, and on cuda where that differs; "
                   "neutral: what tuned schedules have that were stored before the axis existed");
  Table table({kLeft, kLeft, kLeft, kLeft, kLeft});
  table.header({"axis", "range", "default", "scope", "neutral"});
  for (const AxisInfo& axis : schedule_axes()) {
    table.row({std::string(axis.name), axis_range(axis),
               of_backends(axis, axis.default_value, axis.cuda_default), scope_text(axis),
               of_backends(axis, axis.neutral_value, axis.cuda_neutral)});
    table.remark(std::string(axis.meaning));
  }
  std::cout << table;
}

void print_constraints() {
  std::cout << "#\n# what schedules must keep to besides\n";
  Table table({kLeft, kLeft, kLeft});
  table.header({"backend", "rule", "reason"});
  for (const ConstraintInfo& c : schedule_constraints()) {
    table.row({c.backend ? name(*c.backend) : "all", std::string(c.rule), cat(c.reason)});
  }
  std::cout << table;
}

void print_environment() {
  std::cout << "#\n# environment variables\n";
  Table table({kLeft, kLeft, kLeft});
  table.header({"name", "default", "meaning"});
  for (const EnvVariable& variable : environment_variables()) {
    table.row({std::string(variable.name), std::string(variable.default_text),
               std::string(variable.meaning)});
  }
  std::cout << table;
  const std::string unknown = unknown_variables_text();
  if (!unknown.empty()) std::cout << "# set, but read by nothing: " << unknown << '\n';
}

struct InfoFlags {
  std::string shape;
  int ranks = 1;
  std::int64_t capacity = 0;
  KeptFlags kept;
  ArithmeticFlags arithmetic;
};

}  // namespace

void add_info(CLI::App& app, Invocation& invocation) {
  (void)invocation;
  CLI::App* sub = add_command(
      app, "info",
      "Version, build, backends, devices, schedules and environment variables; with --shape, "
      "the memory that a layer takes");
  const auto flags = std::make_shared<InfoFlags>();
  OptionGroup group(*sub);
  CLI::Option* shape =
      group.add("--shape", flags->shape, "NAME[,key=value...]", "A shape, as uniep run takes it");
  group
      .add("--ranks", flags->ranks, "N",
           cat("Ranks of the group, ", ranks_accepted(), " (default 1)"))
      ->check(a_number_of_ranks())
      ->needs(shape);
  group
      .add("--capacity", flags->capacity, "ROWS",
           "Rows that a rank has room for (default 0: enough for any routing of a small layer, "
           "twice the balanced load of a large one)")
      ->check(range<std::int64_t>(0, 2147483647))
      ->needs(shape);
  add_kept(group, flags->kept);
  add_arithmetic(group, flags->arithmetic, shape);
  for (const char* option : {"--save", "--recompute-h", "--backward-rows", "--activation",
                             "--probs", "--bias", "--as-model", "--combine-groups",
                             "--combine-partials", "--shared-experts", "--shared-gate"}) {
    sub->get_option(option)->needs(shape);
  }
  sub->footer(
      "Examples:\n  uniep info\n  uniep info --shape deepseek-v3 --ranks 4 --capacity 131072");
  sub->callback([flags] {
    if (!flags->shape.empty()) {
      workload::ShapeSpec spec = workload::parse_shape(flags->shape);
      flags->arithmetic.apply_to(spec);
      return print_memory(std::cout, spec, flags->ranks, flags->capacity, flags->kept);
    }
    print_build();
    print_presets();
    print_axes();
    print_constraints();
    print_graph(std::cout);
    print_environment();
  });
}

}  // namespace uniep::tool
