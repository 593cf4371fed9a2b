#include "tuning/tune_memory.h"

#include <algorithm>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "common/table.h"
#include "simulate/memory_report.h"
#include "tune/model/cost_model.h"
#include "tuning/tune_report.h"

namespace uniep::tool {
namespace {

using enum Table::Align;

/// Seconds of one layer under the default schedule; 0 if nothing is known of the machine.
double predicted_s(const BenchCase& bench, const TuneCall& call) {
  if (!call.settings.profile) return 0;
  const std::vector<RoutingPlan> plans =
      tune::plans_to_simulate(bench.problem, bench.tokens_per_rank(), bench.routing.topk_ids,
                              tune::kMostSimulatedRanks, bench.hosts);
  double seconds = 0;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    seconds += tune::simulate(plans, pass, default_schedule(call.ranks.backend),
                              *call.settings.profile, {.topology = call.settings.topology})
                   .seconds;
  }
  return seconds;
}

bool same_passes(const PlannedChoice& a, const PlannedChoice& b) {
  return a.save == b.save && a.recompute_h == b.recompute_h;
}

/// The choices that fit, fastest first. Of those with the same passes one: the cheapest to the
/// host.
std::vector<PlannedChoice> to_measure(const MemoryPlan& plan, const ModelMemory& model) {
  std::vector<PlannedChoice> fitting;
  for (const PlannedChoice& choice : plan.choices) {  // exact rows come last
    const auto same = [&](const PlannedChoice& other) { return same_passes(choice, other); };
    if (fits(choice, model) && std::ranges::none_of(fitting, same)) fitting.push_back(choice);
  }
  std::ranges::stable_sort(fitting, {}, &PlannedChoice::seconds);
  return fitting;
}

struct MeasuredChoice {
  PlannedChoice choice;
  TunedLayer layer;
  double seconds = 0;  ///< forward and backward of all layers, as measured; 0: no result
};

const MeasuredChoice* fastest_of(const std::vector<MeasuredChoice>& measured) {
  const MeasuredChoice* fastest = nullptr;
  for (const MeasuredChoice& m : measured) {
    if (m.seconds > 0 && (fastest == nullptr || m.seconds < fastest->seconds)) fastest = &m;
  }
  return fastest;
}

MeasuredChoice measure(const TuneCall& call, const ModelMemory& model, const PlannedChoice& choice,
                       const std::string& what) {
  if (call.ranks.speaks) std::cout << "#\n" << comment(what) << std::flush;
  BenchCase bench = call.bench;
  bench.problem.save = choice.save;
  bench.problem.recompute_h = choice.recompute_h;
  MeasuredChoice measured{
      .choice = choice,
      .layer = tune_layer({call.flags, call.invocation, call.ranks, call.settings, bench})};
  if (measured.layer.seconds) measured.seconds = model.layers * *measured.layer.seconds;
  return measured;
}

/// One choice after another, as far as it is not interrupted.
std::vector<MeasuredChoice> measure_all(const TuneCall& call, const MemoryPlan& plan,
                                        const ModelMemory& model) {
  std::vector<MeasuredChoice> all;
  const std::vector<PlannedChoice> choices = to_measure(plan, model);
  for (const PlannedChoice& choice : choices) {
    all.push_back(measure(call, model, choice,
                          cat("choice ", all.size() + 1, " of ", choices.size(),
                              " that fit: ", arguments(plan, choice))));
    if (all.back().layer.interrupted) break;
  }
  return all;
}

const MeasuredChoice* measured_as(const std::vector<MeasuredChoice>& measured,
                                  const PlannedChoice& choice) {
  const auto found = std::ranges::find_if(
      measured, [&](const MeasuredChoice& m) { return same_passes(m.choice, choice); });
  return found == measured.end() || found->seconds == 0 ? nullptr : &*found;
}

void print_choices(const MemoryPlan& plan, const ModelMemory& model,
                   const std::vector<MeasuredChoice>& measured) {
  const auto word = [](bool value) { return value ? "yes" : "no"; };
  Table table({kLeft, kLeft, kLeft, kRight, kRight, kRight, kLeft});
  table.header({"", "", "", "total", "predicted", "measured", ""});
  table.header({"save", "recompute_h", "rows", "(GB)", "(ms)", "(ms)", "verdict"});
  for (const PlannedChoice& c : plan.choices) {
    const MeasuredChoice* m = measured_as(measured, c);
    table.row({name(c.save), word(c.recompute_h), rows_text(c), gb(c.total()),
               c.seconds > 0 ? milliseconds(c.seconds) : "-",
               m != nullptr ? milliseconds(m->seconds) : "-", verdict(c, model)});
  }
  std::cout << "#\n"
            << comment(cat("forward and backward of ", model_text(model),
                           "; measured with the best schedules found, in memory for the capacity: "
                           "without the wait of the host that exact rows have"))
            << table;
}

std::string conclusion(const MemoryPlan& plan, const std::vector<MeasuredChoice>& measured) {
  const MeasuredChoice* best = fastest_of(measured);
  if (best == nullptr) return "no choice has a result";
  return cat("fastest that fits: ", arguments(plan, best->choice), ": ", gb(best->choice.total()),
             " GB, ", milliseconds(best->seconds), " ms, with --schedule ", best->layer.schedules);
}

/// Each of the plan's choices as it turned out, and the index of the fastest.
Json memory_json(const MemoryPlan& plan, const ModelMemory& model,
                 const std::vector<MeasuredChoice>& measured) {
  Json choices = Json::array();
  for (const PlannedChoice& c : plan.choices) {
    const MeasuredChoice* m = measured_as(measured, c);
    Json json = choice_json(c, model);
    if (c.seconds == 0) json["predicted_ms"] = nullptr;
    json["measured_ms"] = m != nullptr ? Json(1e3 * m->seconds) : Json();
    choices.push_back(std::move(json));
  }
  const MeasuredChoice* best = fastest_of(measured);
  Json fastest;
  for (std::size_t i = 0; best != nullptr && i < plan.choices.size(); ++i) {
    const PlannedChoice& c = plan.choices[i];
    const bool same_rows = c.exact_rows == best->choice.exact_rows && c.pool == best->choice.pool;
    if (same_passes(c, best->choice) && same_rows) fastest = i;
  }
  Json json = model_json(model);
  json["needed_capacity_rows"] = plan.needed_capacity > 0 ? Json(plan.needed_capacity) : Json();
  json["choices"] = std::move(choices);
  json["fastest"] = std::move(fastest);
  return json;
}

/// The figures of every direction, with the choice that they are of.
Json passes_json(const std::vector<MeasuredChoice>& measured) {
  Json passes = Json::array();
  for (const MeasuredChoice& m : measured) {
    for (Json pass : m.layer.passes) {
      pass["save"] = name(m.choice.save);
      pass["recompute_h"] = m.choice.recompute_h;
      passes.push_back(std::move(pass));
    }
  }
  return passes;
}

}  // namespace

int run_memory_tuning(const TuneCall& call, const ModelMemory& model) {
  const MemoryPlan plan = plan_memory(
      call.bench, model, [&](const BenchCase& bench) { return predicted_s(bench, call); });
  require(!to_measure(plan, model).empty(), ErrorCode::kCapacity, nothing_fits(plan));
  const std::vector<MeasuredChoice> measured = measure_all(call, plan, model);
  if (!call.ranks.speaks) return kExitOk;
  print_choices(plan, model, measured);
  std::cout << comment(conclusion(plan, measured)) << std::flush;
  TunedLayer all;
  for (const MeasuredChoice& m : measured) {
    all.failed = all.failed || m.layer.failed;
    all.too_small = all.too_small || m.layer.too_small;
    all.interrupted = all.interrupted || m.layer.interrupted;
  }
  all.passes = passes_json(measured);
  write_tuning(call, all, {{"memory", memory_json(plan, model, measured)}});
  return exit_code(all);
}

}  // namespace uniep::tool
