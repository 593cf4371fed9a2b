#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "common/record_json.h"
#include "simulate/memory_plan.h"

namespace uniep::tool {

/// "2 layers, 4 microbatches in flight, ...".
std::string model_text(const ModelMemory& model);

/// What the columns of a plan mean, as comments.
void print_plan_legend(std::ostream& out);

/// A table of the choices at one number of ranks, and the fastest that fits.
void print_plan(std::ostream& out, const MemoryPlan& plan, const ModelMemory& model);

/// What a result file says of the model, and of the choices at each number of ranks.
Json model_json(const ModelMemory& model);
Json plans_json(const std::vector<MemoryPlan>& plans, const ModelMemory& model);

}  // namespace uniep::tool
