#include "layer/saved_pages.h"

#include "base/check.h"

namespace uniep {
namespace {

Problem page_problem(const Problem& p) {
  return {.hidden = p.hidden,
          .intermediate = p.intermediate,
          .row_align = p.row_align,
          .save = p.save,
          .recompute_h = p.recompute_h,
          // A row of h has one half or two; nothing else of the arithmetic shows in a page.
          .activation = is_gated(p.activation) ? Activation::kSwiglu : Activation::kSilu};
}

std::string shape_text(const Problem& p) {
  return cat("hidden=", p.hidden, ", intermediate=", p.intermediate, ", row_align=", p.row_align,
             ", save=", name(p.save), ", recompute_h=", p.recompute_h ? "true" : "false",
             is_gated(p.activation) ? "" : ", without a gate");
}

}  // namespace

void check_pool(const RowPoolData& pool, Backend backend, const Problem& problem) {
  require(pool.backend == backend, ErrorCode::kInvalidArgument, "options.row_pool is of the ",
          name(pool.backend), " backend; one of the layer's communicator is accepted");
  require(page_problem(pool.problem) == page_problem(problem), ErrorCode::kInvalidArgument,
          "options.row_pool has pages for ", shape_text(pool.problem), "; one for ",
          shape_text(problem), " is accepted");
}

void check_plan_pages(const RowPoolData* pool, const StepMemory& memory) {
  require(pool == nullptr || memory.plan.empty(), ErrorCode::kInvalidArgument, "memory.plan has ",
          memory.plan.size(),
          " bytes, but the layer has a row pool; none are accepted, since memory of the caller's "
          "could not give a plan's pages back");
}

void check_forward_pages(const RowPoolData* pool, const RoutingPlan& plan,
                         const StepMemory& memory) {
  const PageLease* lease = plan.data().lease.get();
  if (pool == nullptr) {
    require(lease == nullptr, ErrorCode::kInvalidArgument,
            "plan has pages of a row pool, and this layer has no pool; a plan of this layer is "
            "accepted");
    return;
  }
  require(lease != nullptr && lease->is_of(pool), ErrorCode::kInvalidArgument,
          "plan has no pages of the layer's row pool; a plan of a layer with that pool is "
          "accepted");
  require(!lease->had_forward(), ErrorCode::kInvalidArgument,
          "plan has had a forward pass; with a row pool, whose pages a plan takes once, a new plan "
          "is accepted");
  require(memory.x_rows.empty() && memory.h.empty() && memory.row_probs.empty(),
          ErrorCode::kInvalidArgument,
          "memory has x_rows, h or row_probs, but the layer has a row pool for them; none are "
          "accepted");
}

void check_restore_pages(const RowPoolData* pool) {
  require(pool == nullptr, ErrorCode::kInvalidArgument,
          "the layer has a row pool, and what it saves is not in the caller's memory; what forward "
          "returned is accepted, or a layer without a pool");
}

bool reads_saved(PassPart part, const Problem& problem) {
  const GraphChoice choice = choice_of(problem);
  bool reads = false;
  kLayerGraph.for_each_stage(Pass::kBackward, [&](const StageRow& stage) {
    const bool of_weights = stage.grid == TileGrid::kWeightTiles;
    if (part != PassPart::kWhole && of_weights != (part == PassPart::kWeights)) return;
    if (!holds(stage.when, choice)) return;
    for (const Tensor t : stage.reads) {
      // Of weight gradients, db2 alone is made of probabilities.
      const bool unused = of_weights && t == Tensor::kRowProbs && !choice.has_bias;
      reads = reads || (!unused && is_saved(kLayerGraph[t], choice));
    }
  });
  return reads;
}

void check_backward_pages(const SavedData& saved, PassPart part) {
  if (!saved.lease || !reads_saved(part, saved.plan.problem())) return;
  require(saved.lease->is_held(), ErrorCode::kInvalidArgument,
          "saved has no pages any more: a backward pass gave them back to the row pool; one with "
          "CallOptions::keep_pages keeps them for another");
}

bool ends_pages(const SavedData& saved, PassPart part, const CallOptions& options) {
  if (!saved.lease || options.keep_pages) return false;
  return part != PassPart::kData || !reads_saved(PassPart::kWeights, saved.plan.problem());
}

}  // namespace uniep
