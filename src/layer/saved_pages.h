#pragma once

#include "layer/row_pool_data.h"
#include "layer/saved_data.h"
#include "schedule/pass_view.h"
#include "uniep/layer.h"

// When a plan's pages may be used, and when they go back: the same for every backend. Each check
// throws Error(kInvalidArgument).

namespace uniep {

/// Whether a layer of `problem` saves other rows than the pool has pages for, or elsewhere.
void check_pool(const RowPoolData& pool, Backend backend, const Problem& problem);

// `pool`: the layer's, or null.
void check_plan_pages(const RowPoolData* pool, const StepMemory& memory);
void check_forward_pages(const RowPoolData* pool, const RoutingPlan& plan,
                         const StepMemory& memory);
void check_restore_pages(const RowPoolData* pool);
void check_backward_pages(const SavedData& saved, PassPart part);

/// Whether that part of a backward pass reads anything that is saved.
bool reads_saved(PassPart part, const Problem& problem);

/// Whether pages go back behind a part of a backward pass: if the rest of the pass reads nothing
/// that is saved, and the caller does not keep them.
bool ends_pages(const SavedData& saved, PassPart part, const CallOptions& options);

}  // namespace uniep
