#pragma once

#include <memory>
#include <span>

#include "cuda/buffer_pool.h"
#include "cuda/layer_memory.h"
#include "uniep/layer.h"

namespace uniep::cuda {

/// Which memory each call of a layer works in: the caller's where it brings some, else the layer's,
/// which is handed from call to call.
class CallMemory {
 public:
  /// `workspace`: the caller's, or null.
  CallMemory(const Problem& problem, int num_ranks, std::byte* workspace);

  /// What one step takes is there from then on, so that it can be captured in a CUDA graph, and
  /// that a lack of memory shows here; but for what it saves, if that is in a row pool. If the
  /// workspace is the caller's, nothing is reserved: such a caller brings plans and saved tensors
  /// too, as a rule, and else they are allocated when taken.
  void reserve_step(bool row_pool);

  const LayerWorkspace& workspace() const { return workspace_; }
  PlanScratch plan_scratch() const;

  // `captured`: by a call that is captured in a CUDA graph, and so cannot allocate. What is taken
  // goes back to the layer when its last owner lets go of it. `given` is the caller's, or empty.

  /// The layout of what `saved` returns.
  static SavedLayout saved_layout(const Problem& problem, int num_ranks);

  // Held by what the caller gets.
  std::shared_ptr<std::byte> plan(std::span<std::byte> given, bool captured);
  std::shared_ptr<std::byte> saved(bool captured);
  std::shared_ptr<std::byte> backward_memory(std::span<std::byte> given, bool captured);

  // Until the call at hand ends.
  std::shared_ptr<std::byte> order(bool captured);
  std::shared_ptr<std::byte> rows(Pass pass, std::span<std::byte> given, bool captured);

 private:
  /// What a step takes at a time, of as many rows as there is capacity for.
  struct StepBytes {
    std::int64_t plan, saved, forward_memory, backward_memory, order;
  };
  static StepBytes step_bytes(const Problem& problem, int num_ranks);

  std::shared_ptr<std::byte> take(std::byte* given, std::int64_t bytes, BufferPool::Use use,
                                  bool captured);

  const StepBytes bytes_;
  const PlanScratchLayout plan_scratch_;
  const LayerWorkspace workspace_;
  BufferPool pool_;
};

}  // namespace uniep::cuda
