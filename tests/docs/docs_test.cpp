// Tables in docs/ that restate declarations in the code must say the same.
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "base/check.h"
#include "base/env.h"
#include "graph/description.h"
#include "graph/layer_graph.h"
#include "schedule/axes.h"
#include "schedule/space.h"
#include "support/temporary_folder.h"
#include "uniep/schedule.h"

namespace uniep {
namespace {

std::string read_doc(const std::string& name) {
  return testing::file_text(std::string(UNIEP_DOCS_DIR) + "/" + name);
}

std::string values_text(const AxisInfo& axis) {
  std::string text;
  for (const auto& choice : axis.choices) text += cat(text.empty() ? "" : ", ", choice);
  if (axis.power_of_two) return cat(axis.min, " to ", axis.max, ", powers of two");
  return text.empty() ? cat(axis.min, " to ", axis.max) : text;
}

std::string neutral_text(const AxisInfo& axis) {
  const std::string on_cpu = axis_value_text(axis, axis.neutral_value);
  if (axis.cuda_neutral == axis.neutral_value) return on_cpu;
  return cat(on_cpu, "; CUDA: ", axis_value_text(axis, axis.cuda_neutral));
}

std::string axes_table() {
  std::string table =
      "| axis | values | default, CPU | default, CUDA | neutral | scope | meaning |\n"
      "|---|---|---|---|---|---|---|\n";
  for (const AxisInfo& a : schedule_axes()) {
    table +=
        cat("| `", a.name, "` | ", values_text(a), " | ", axis_value_text(a, a.default_value),
            " | ", axis_value_text(a, a.cuda_default), " | ", neutral_text(a), " | ",
            a.scope == AxisScope::kLaunch ? "launch" : "compile-time", " | ", a.meaning, " |\n");
  }
  return table;
}

std::string presets_table() {
  std::string table = "| preset | what it reproduces | sets |\n|---|---|---|\n";
  for (const PresetInfo& p : schedule_presets()) {
    table += cat("| `", p.name, "` | ", p.meaning, " | `", p.sets, "` |\n");
  }
  return table;
}

std::string constraints_table() {
  std::string table = "| rule | backend | reason |\n|---|---|---|\n";
  for (const ConstraintInfo& c : schedule_constraints()) {
    table +=
        cat("| ", c.rule, " | ", c.backend ? name(*c.backend) : "all", " | ", c.reason, " |\n");
  }
  return table;
}

std::string list_of(const AxisInfo& axis, const std::vector<int>& values) {
  std::string text;
  for (const int v : values) text += cat(text.empty() ? "" : ", ", axis_value_text(axis, v));
  return text;
}

std::string candidates_table() {
  std::string table =
      "| axis | tried on CPU | tried on CUDA | has an effect |\n|---|---|---|---|\n";
  for (const AxisInfo& a : schedule_axes()) {
    table +=
        cat("| `", a.name, "` | ", list_of(a, a.candidates), " | ", list_of(a, a.cuda_candidates),
            " | ", a.effect.empty() ? "always" : a.effect, " |\n");
  }
  return table;
}

std::string markdown(const TextTable& table) {
  const auto line = [](const std::vector<std::string>& cells) {
    std::string text = "|";
    for (const std::string& cell : cells) text += cat(' ', cell, " |");
    return text + '\n';
  };
  std::string text = line(table.header) + '|';
  for (std::size_t i = 0; i < table.header.size(); ++i) text += "---|";
  text += '\n';
  for (const auto& row : table.rows) text += line(row);
  return text;
}

/// What docs/graph.md shows of the graph.
std::string graph_section() {
  std::string text;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    text += cat("### The ", name(pass), " pass\n\n```mermaid\n", flowchart(kLayerGraph, pass),
                "```\n\n", markdown(describe_stages(kLayerGraph, pass)), '\n');
  }
  return cat(text, "### Tensors\n\n", markdown(describe_tensors(kLayerGraph)), "\n### Counters\n\n",
             markdown(describe_counters(kLayerGraph)));
}

std::string environment_table() {
  std::string table = "| variable | meaning | default |\n|---|---|---|\n";
  for (const EnvVariable& v : environment_variables()) {
    table += cat("| `", v.name, "` | ", v.meaning, " | ", v.default_text, " |\n");
  }
  return table;
}

TEST(Docs, ScheduleListsEveryAxis) {
  EXPECT_NE(read_doc("schedule.md").find(axes_table()), std::string::npos)
      << "docs/schedule.md should contain:\n"
      << axes_table();
}

TEST(Docs, ScheduleListsEveryConstraint) {
  EXPECT_NE(read_doc("schedule.md").find(constraints_table()), std::string::npos)
      << "docs/schedule.md should contain:\n"
      << constraints_table();
}

TEST(Docs, ScheduleListsWhatIsTried) {
  EXPECT_NE(read_doc("schedule.md").find(candidates_table()), std::string::npos)
      << "docs/schedule.md should contain:\n"
      << candidates_table();
}

TEST(Docs, ScheduleListsEveryPreset) {
  EXPECT_NE(read_doc("schedule.md").find(presets_table()), std::string::npos)
      << "docs/schedule.md should contain:\n"
      << presets_table();
}

TEST(Docs, TuningSaysHowLargeTheSpaceIs) {
  const auto points = [](Backend backend) {
    const double combinations = Space({}, Pass::kForward, {.backend = backend}).combinations();
    const auto exponent = static_cast<int>(std::floor(std::log10(combinations)));
    const double mantissa = std::round(combinations / std::pow(10, exponent - 1)) / 10;
    return cat(mantissa, "e", exponent);
  };
  const std::string text = read_doc("tuning.md");
  EXPECT_NE(text.find(points(Backend::kCpu) + " combinations"), std::string::npos)
      << points(Backend::kCpu);
  EXPECT_NE(text.find(points(Backend::kCuda) + " on a GPU"), std::string::npos)
      << points(Backend::kCuda);
}

TEST(Docs, GraphShowsStagesTensorsAndCounters) {
  EXPECT_NE(read_doc("graph.md").find(graph_section()), std::string::npos)
      << "docs/graph.md should contain:\n"
      << graph_section();
}

/// Stages of the graph, in its order: those of every layer, pass by pass, then those of layers that
/// keep less, with the enter ahead of them, then those of groups on several hosts, once.
std::vector<std::string> stages_to_draw() {
  std::vector<std::string> always, sometimes{name(Stage::kEnter)}, of_hosts;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    kLayerGraph.for_each_stage(pass, [&](const StageRow& row) {
      if (row.when != When::kHosts) {
        (row.when == When::kAlways ? always : sometimes).emplace_back(row.name);
      } else if (pass == Pass::kForward) {
        of_hosts.emplace_back(row.name);
      }
    });
  }
  always.insert(always.end(), sometimes.begin(), sometimes.end());
  always.insert(always.end(), of_hosts.begin(), of_hosts.end());
  return always;
}

TEST(Docs, PicturesOfArchitectureHaveEveryStage) {
  std::vector<std::string> drawn;
  std::istringstream page(read_doc("architecture.md"));
  bool in_picture = false;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("```")) in_picture = !in_picture;
    if (!in_picture || !line.starts_with("   ") || line.starts_with("    ")) continue;
    drawn.push_back(line.substr(3, line.find(' ', 3) - 3));
  }
  EXPECT_EQ(drawn, stages_to_draw());
}

TEST(Docs, EnvironmentListsEveryVariable) {
  EXPECT_NE(read_doc("environment.md").find(environment_table()), std::string::npos)
      << "docs/environment.md should contain:\n"
      << environment_table();
}

}  // namespace
}  // namespace uniep
