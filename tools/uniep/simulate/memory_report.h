#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "common/record_json.h"
#include "simulate/memory_plan.h"

namespace uniep::tool {

/// "2 layers, 4 microbatches in flight, ...".
std::string model_text(const ModelMemory& model);

/// Bytes in 1e9: "39.854".
std::string gb(std::int64_t bytes);

/// A choice as uniep.MoELayer takes it.
std::string arguments(const MemoryPlan& plan, const PlannedChoice& choice);

/// Which rows it keeps memory for: "capacity", "pool" or "exact".
const char* rows_text(const PlannedChoice& choice);

/// "fits", or by how much it does not.
std::string verdict(const PlannedChoice& choice, const ModelMemory& model);

/// The sentence that no choice fits, and what would.
std::string nothing_fits(const MemoryPlan& plan);

/// What the columns of a plan mean, as comments.
void print_plan_legend(std::ostream& out);

/// A table of the choices at one number of ranks, and the fastest that fits.
void print_plan(std::ostream& out, const MemoryPlan& plan, const ModelMemory& model);

/// What a result file says of the model, of a choice, and of the choices at each number of ranks.
Json model_json(const ModelMemory& model);
Json choice_json(const PlannedChoice& choice, const ModelMemory& model);
Json plans_json(const std::vector<MemoryPlan>& plans, const ModelMemory& model);

}  // namespace uniep::tool
