#include "simulate/memory_report.h"

#include <algorithm>
#include <cmath>
#include <ostream>

#include "base/check.h"
#include "common/table.h"

namespace uniep::tool {
namespace {

using enum Table::Align;

std::string gb_of(double bytes) { return formatted("%.3f", bytes * 1e-9); }

/// What is printed then is no less.
double rounded_up(double bytes) { return 1e6 * std::ceil(1e-6 * bytes); }

std::string conclusion(const MemoryPlan& plan, const ModelMemory& model) {
  if (const PlannedChoice* best = fastest_that_fits(plan, model)) {
    return cat("fastest that fits: ", arguments(plan, *best), ": ", gb(best->total()), " GB, ",
               milliseconds(best->seconds), " ms");
  }
  return nothing_fits(plan);
}

void print_heading(std::ostream& out, const MemoryPlan& plan) {
  const PlannedChoice& of_capacity = plan.choices[0];
  const PlannedChoice& exact =
      *std::ranges::find_if(plan.choices, [](const PlannedChoice& c) { return c.exact_rows; });
  out << "#\n"
      << comment(cat(counted(plan.ranks, "rank", "ranks"), ": room for ", of_capacity.rows,
                     " rows, with exact_rows or a row pool for ", exact.rows, "; weights ",
                     gb(of_capacity.weights), " GB",
                     plan.one_stands_for_all ? "; the fullest rank stands for all" : ""));
}

}  // namespace

std::string gb(std::int64_t bytes) { return gb_of(static_cast<double>(bytes)); }

std::string arguments(const MemoryPlan& plan, const PlannedChoice& choice) {
  const auto truth = [](bool value) { return value ? "True" : "False"; };
  return cat("save=\"", name(choice.save), "\", recompute_h=", truth(choice.recompute_h),
             choice.pool > 0 ? cat(", row_pool=", choice.pool)
                             : cat(", exact_rows=", truth(choice.exact_rows)),
             choice.backward_rows > 0 ? cat(", backward_rows=", choice.backward_rows) : "",
             plan.needed_capacity > 0 ? cat(", capacity_rows=", plan.needed_capacity) : "");
}

std::string verdict(const PlannedChoice& choice, const ModelMemory& model) {
  if (fits(choice, model)) return "fits";
  return cat("too large by ", gb_of(rounded_up(static_cast<double>(choice.total()) - model.bytes)),
             " GB");
}

std::string nothing_fits(const MemoryPlan& plan) {
  const PlannedChoice& least = smallest(plan);
  const double enough = rounded_up(static_cast<double>(least.total()));
  return cat("nothing fits; the least is ", arguments(plan, least), ": --memory ", gb_of(enough),
             " would do");
}

const char* rows_text(const PlannedChoice& choice) {
  if (choice.pool > 0) return "pool";
  return choice.exact_rows ? "exact" : "capacity";
}

namespace {

Json pool_json(const PlannedChoice& choice) {
  return choice.pool > 0 ? Json(choice.pool) : Json(nullptr);
}

}  // namespace

Json choice_json(const PlannedChoice& choice, const ModelMemory& model) {
  return {{"save", name(choice.save)},
          {"recompute_h", choice.recompute_h},
          {"exact_rows", choice.exact_rows},
          {"row_pool", pool_json(choice)},
          {"backward_rows", choice.backward_rows},
          {"rows", choice.rows},
          {"kept_bytes", choice.kept},
          {"pass_bytes", choice.pass},
          {"shared_bytes", choice.shared},
          {"weight_bytes", choice.weights},
          {"total_bytes", choice.total()},
          {"predicted_ms", 1e3 * choice.seconds},
          {"fits", fits(choice, model)}};
}

std::string model_text(const ModelMemory& model) {
  return cat(counted(model.layers, "layer", "layers"), ", ",
             counted(model.in_flight, "microbatch", "microbatches"), " in flight, ",
             model.bytes_of_parameter, " bytes a parameter of the experts; ", model.bytes * 1e-9,
             " GB a rank");
}

void print_plan_legend(std::ostream& out) {
  out << "#\n"
      << comment(
             "predicted, not measured. Bytes are of one rank, in 1e9 (GB). kept: by forwards until "
             "their backwards, of all layers and microbatches in flight; pass: what the larger "
             "pass works in; shared: workspace and symmetric memory; total: these and the weights. "
             "time: forward and backward of all layers, of one microbatch")
      << comment(
             "rows: memory for the capacity; pool: a row pool with pages for the rows that come; "
             "exact: exact_rows, for whose count the host waits. That wait is not predicted: the "
             "times are the same. Not counted: x, which autograd keeps and save=none reads again, "
             "and all else "
             "that is not uniep's");
}

void print_plan(std::ostream& out, const MemoryPlan& plan, const ModelMemory& model) {
  print_heading(out, plan);
  Table table({kLeft, kLeft, kLeft, kRight, kRight, kRight, kRight, kRight, kLeft});
  table.header({"", "", "", "kept", "pass", "shared", "total", "time", ""});
  table.header({"save", "recompute_h", "rows", "(GB)", "(GB)", "(GB)", "(GB)", "(ms)", "verdict"});
  const auto word = [](bool value) { return value ? "yes" : "no"; };
  for (const PlannedChoice& c : plan.choices) {
    table.row({name(c.save), word(c.recompute_h), rows_text(c), gb(c.kept), gb(c.pass),
               gb(c.shared), gb(c.total()), milliseconds(c.seconds), verdict(c, model)});
  }
  out << table << comment(conclusion(plan, model));
}

Json model_json(const ModelMemory& model) {
  return {{"memory_gb", model.bytes * 1e-9},
          {"layers", model.layers},
          {"in_flight", model.in_flight},
          {"bytes_of_parameter", model.bytes_of_parameter}};
}

Json plans_json(const std::vector<MemoryPlan>& plans, const ModelMemory& model) {
  Json list = Json::array();
  for (const MemoryPlan& plan : plans) {
    const PlannedChoice* fastest = fastest_that_fits(plan, model);
    Json choices = Json::array();
    for (const PlannedChoice& choice : plan.choices) choices.push_back(choice_json(choice, model));
    list.push_back(
        {{"ranks", plan.ranks},
         {"one_stands_for_all", plan.one_stands_for_all},
         {"needed_capacity_rows",
          plan.needed_capacity > 0 ? Json(plan.needed_capacity) : Json(nullptr)},
         {"choices", choices},
         {"fastest", fastest == nullptr ? Json(nullptr) : Json(fastest - plan.choices.data())},
         {"smallest", &smallest(plan) - plan.choices.data()}});
  }
  return list;
}

}  // namespace uniep::tool
