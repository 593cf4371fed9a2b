#include "simulate/memory_plan.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "common/layer_memory.h"
#include "common/table.h"
#include "layout/page_pool.h"

namespace uniep::tool {
namespace {

/// A sum of several of these is an int64 still.
constexpr double kMostBytes = 1e18;

template <class Value>
void require_memory_beside(const char* flag, const std::optional<Value>& value) {
  require(!value, ErrorCode::kInvalidArgument, flag, " is ", value.value_or(Value{}),
          ", but there is no memory to plan; it is accepted with --memory");
}

/// The most of any rank.
StepRows fullest_rank_rows(const BenchCase& bench) {
  StepRows most;
  for (int rank = 0; rank < bench.ranks; ++rank) {
    most.rows = std::max(most.rows, bench.padded_rows(rank));
    most.received = std::max(most.received, bench.received_tokens(rank));
  }
  return most;
}

std::int64_t counted_bytes(double bytes) {
  require(bytes <= kMostBytes, ErrorCode::kCapacity, "the layers of the plan take some ",
          formatted("%.3g", bytes), " bytes of a rank; at most ", formatted("%.0e", kMostBytes),
          " are planned, so fewer --layers or --in-flight are accepted");
  return std::llround(bytes);
}

/// The choice if calls take memory for so many rows.
PlannedChoice planned(const BenchCase& layer, const ModelMemory& model, const StepRows& rows) {
  const Problem& problem = layer.problem;
  const RankBytes bytes = rank_bytes(problem, layer.ranks, rows, layer.hosts);
  const double forwards = static_cast<double>(model.layers) * model.in_flight;
  const auto parameters = static_cast<double>(weight_parameters(problem, layer.ranks));
  return {.save = problem.save,
          .recompute_h = problem.recompute_h,
          .backward_rows = problem.backward_rows,
          .rows = rows.rows,
          .kept = counted_bytes(static_cast<double>(bytes.kept) * forwards),
          .pass = bytes.pass,
          .shared = bytes.shared,
          .weights = counted_bytes(parameters * model.bytes_of_parameter * model.layers)};
}

/// The choice if so many rows are in pages. What a pass works in is of the capacity all the same.
PlannedChoice planned_in_pool(const BenchCase& layer, const ModelMemory& model,
                              const StepRows& rows) {
  const Problem& problem = layer.problem;
  PlannedChoice choice = planned(layer, model, room_for(problem, layer.ranks));
  const double forwards = static_cast<double>(model.layers) * model.in_flight;
  const std::int64_t pages = page_shape(problem).pages_of(rows.rows, rows.received);
  choice.rows = rows.rows;
  choice.pool = counted_bytes(static_cast<double>(
      bytes_for_pages(page_bytes(problem), std::llround(static_cast<double>(pages) * forwards))));
  const std::int64_t plan = rank_bytes(problem, layer.ranks, rows).plan;
  choice.kept = choice.pool + counted_bytes(static_cast<double>(plan) * forwards);
  return choice;
}

}  // namespace

std::optional<ModelMemory> model_memory(const MemoryFlags& flags) {
  if (!flags.memory_gb) {
    require_memory_beside("--layers", flags.layers);
    require_memory_beside("--in-flight", flags.in_flight);
    require_memory_beside("--weight-bytes", flags.weight_bytes);
    return std::nullopt;
  }
  require(flags.layers.has_value(), ErrorCode::kInvalidArgument, "--memory is ", *flags.memory_gb,
          ", but nothing says how many layers share it; it is accepted with --layers");
  ModelMemory model{.bytes = *flags.memory_gb * 1e9, .layers = *flags.layers};
  model.in_flight = flags.in_flight.value_or(model.in_flight);
  model.bytes_of_parameter = flags.weight_bytes.value_or(model.bytes_of_parameter);
  return model;
}

MemoryPlan plan_memory(const BenchCase& bench, const ModelMemory& model,
                       const PredictLayer& predict) {
  const int ranks = bench.ranks;
  MemoryPlan plan{.ranks = ranks};
  const StepRows exact_rows = fullest_rank_rows(bench);
  // What a layer has that is told nothing, not what benchmarks set.
  Problem problem = bench.problem;
  problem.capacity_rows = 0;
  if (exact_rows.rows > capacity_rows(problem, ranks)) {
    plan.needed_capacity = problem.capacity_rows = exact_rows.rows;
  }
  for (const Save save : kSaves) {
    for (const bool recompute_h : {false, true}) {
      BenchCase layer = bench;
      layer.problem = problem;
      layer.problem.save = save;
      layer.problem.recompute_h = recompute_h;
      const double seconds = model.layers * predict(layer);
      const auto add = [&](PlannedChoice choice, bool exact) {
        choice.exact_rows = exact;
        choice.seconds = seconds;
        plan.choices.push_back(choice);
      };
      add(planned(layer, model, room_for(layer.problem, ranks)), false);
      add(planned_in_pool(layer, model, exact_rows), false);
      add(planned(layer, model, exact_rows), true);
    }
  }
  return plan;
}

bool fits(const PlannedChoice& choice, const ModelMemory& model) {
  return static_cast<double>(choice.total()) <= model.bytes;
}

const PlannedChoice* fastest_that_fits(const MemoryPlan& plan, const ModelMemory& model) {
  const PlannedChoice* fastest = nullptr;
  for (const PlannedChoice& choice : plan.choices) {  // exact rows, for which the host waits, last
    if (!fits(choice, model)) continue;
    if (fastest == nullptr || choice.seconds < fastest->seconds) fastest = &choice;
  }
  return fastest;
}

const PlannedChoice& smallest(const MemoryPlan& plan) {
  return *std::ranges::min_element(plan.choices, {}, &PlannedChoice::total);
}

}  // namespace uniep::tool
