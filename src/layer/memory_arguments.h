#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "layer/saved_data.h"
#include "uniep/layer.h"

namespace uniep {

// Checks of the memory that a caller gives to a layer, a plan or a pass. Each throws
// Error(kInvalidArgument) that names the memory and what would be accepted.

// The caller's memory: where some is given, it is large enough for `needs` and aligned.

void check_layer_memory(const MemoryNeeds& needs, const LayerMemory& memory, int rank,
                        int num_ranks);
void check_plan_memory(const MemoryNeeds& needs, const StepMemory& memory,
                       std::span<const std::int32_t> topk_ids);
/// Whether it may be too small for what the capacity allows, so that check_saved_memory asks the
/// plan.
bool is_sized_by_routing(const Problem& problem, const MemoryNeeds& needs,
                         const StepMemory& memory);
/// The number of rows that it has for what forward saves; nothing: it has none of that memory.
/// Where these are fewer than the capacity, the plan is asked for its rows, which waits for it.
std::optional<std::int64_t> check_saved_memory(const RoutingPlan& plan, const MemoryNeeds& needs,
                                               const StepMemory& memory);

// What passes work in, and whether all that a call reads and writes is apart. `saved`: what forward
// is going to fill, or what it left.

void check_forward_memory(const MemoryNeeds& needs, const SavedData& saved, const ForwardArgs& args,
                          const StepMemory& memory);
/// Checks a whole pass, or without `weights` its first part.
void check_backward_memory(const MemoryNeeds& needs, const SavedData& saved,
                           const BackwardDataArgs& data, const BackwardWeightsArgs& weights,
                           const StepMemory& memory);
void check_weights_memory(const MemoryNeeds& needs, const SavedData& saved,
                          const BackwardWeightsArgs& args, const StepMemory& memory);

/// All that `Layer::restore` reads; `backward_memory` may be empty. Returns the number of rows.
std::int64_t check_restored_memory(const Problem& problem, const MemoryNeeds& needs,
                                   const StepMemory& memory, std::int64_t tokens);

/// MemoryNeeds::rows_of_x of steps with `rows` rows.
std::int64_t rows_of_x(const Problem& problem, int num_ranks, std::int64_t rows);

/// What Layer::memory_needs was asked for: `rows`, or the capacity.
std::int64_t checked_rows(const Problem& problem, int num_ranks, std::optional<std::int64_t> rows);

}  // namespace uniep
