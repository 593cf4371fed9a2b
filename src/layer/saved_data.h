#pragma once

#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "layer/callers_memory.h"
#include "layer/row_pool_data.h"
#include "layout/tensor_table.h"
#include "plan/plan_data.h"
#include "uniep/layer.h"

namespace uniep {

/// What Saved holds. The tensors are written by forward and only read by backward, but for
/// `backward_memory`.
struct SavedData {
  /// In memory of uniep's own, which has room for so many rows: `memory` owns `base`, at least
  /// `layout.bytes`.
  SavedData(const RoutingPlan& p, std::int64_t num_rows, const SavedLayout& layout,
            std::shared_ptr<void> memory, std::byte* base)
      : plan(p),
        rows(num_rows),
        saved_rows(num_rows),
        memory_(std::move(memory)),
        own_bytes_(layout.bytes) {
    tensors.set(layout, base);
  }
  /// In the caller's x_rows, h and row_probs, as far as they are kept.
  SavedData(const RoutingPlan& p, std::int64_t num_rows, const StepMemory& callers)
      : plan(p), rows(num_rows), saved_rows(num_rows), of_caller(true) {
    const GraphChoice choice = choice_of(p.problem());
    if (!choice.drops_x_rows) tensors.set(Tensor::kXRows, callers.x_rows.data());
    // Of no tokens there may be no memory, whatever its address.
    bf16* const tokens = callers.x_rows.empty() ? nullptr : callers.x_rows.data();
    if (keeps_received(choice)) tensors.set(Tensor::kReceived, tokens);
    if (!choice.drops_h) tensors.set(Tensor::kH, callers.h.data());
    tensors.set(Tensor::kRowProbs, callers.row_probs.data());
  }

  /// In pages of a row pool, from take_pages() on.
  SavedData(const RoutingPlan& p, std::int64_t num_rows, const RowPoolData& pool)
      : plan(p), rows(num_rows), saved_rows(pool.rows()) {
    tensors.set(pool.layout.rows, pool.base);
    if (keeps_received(choice_of(p.problem()))) {
      tensors.set(Tensor::kReceived, pool.base + pool.layout.tokens);
    }
  }
  SavedData(const SavedData&) = delete;
  SavedData& operator=(const SavedData&) = delete;
  ~SavedData() {
    if (lease) lease->give_back();
  }

  /// A forward pass begins. If it has pages, they are the plan's, and go back with this.
  void take_pages() {
    lease = plan.data().lease;
    if (lease) lease->begin_forward();
  }

  bf16* h() const { return tensors.get<Tensor::kH>(); }

  std::int64_t bytes() const {
    std::set<const std::byte*> held;  // what a captured call took stands in both
    for (const auto& of_call : captured_rows) held.insert(of_call.get());
    if (backward_memory && !is_callers(*backward_memory)) held.insert(backward_memory->get());
    const std::int64_t each = RowLayout(plan.problem(), rows, Pass::kBackward).bytes;
    return own_bytes_ + static_cast<std::int64_t>(held.size()) * each;
  }

  /// What a captured call reads or writes lives as long as this does, unless the caller keeps it.
  void keep_for_replays(const std::shared_ptr<std::byte>& of_call) {
    if (!is_callers(of_call)) captured_rows.push_back(of_call);
  }

  /// What backward_weights reads: the rows that the caller gives it, or those of the last
  /// backward_data.
  std::shared_ptr<std::byte> rows_of_weights(std::span<std::byte> given) const {
    return given.empty() ? *backward_memory : callers_memory(given.data());
  }
  /// They are read once.
  void forget_backward_memory(const std::shared_ptr<std::byte>& read) {
    if (backward_memory && backward_memory->get() == read.get()) backward_memory.reset();
  }

  RoutingPlan plan;
  std::int64_t rows;
  std::int64_t saved_rows;             // of `tensors`: as many, or those of a row pool
  bool of_caller = false;              // whose memory `tensors` lie in
  std::shared_ptr<PageLease> lease{};  // with a row pool
  TensorTable tensors;                 // those whose lifetime is kSaved
  /// RowLayout of `rows` (null where there are none), from backward_data until backward_weights.
  std::optional<std::shared_ptr<std::byte>> backward_memory;
  /// Rows of captured calls, which replays write and read again.
  std::vector<std::shared_ptr<std::byte>> captured_rows;

 private:
  std::shared_ptr<void> memory_;
  std::int64_t own_bytes_ = 0;
};

/// What `Layer::restore` returns, once `memory` has been checked.
inline Saved restored(const RoutingPlan& plan, std::int64_t num_rows, const StepMemory& memory) {
  auto saved = std::make_unique<SavedData>(plan, num_rows, memory);
  if (!memory.backward_memory.empty()) {
    saved->backward_memory = callers_memory(memory.backward_memory.data());
  }
  return Saved(std::move(saved));
}

}  // namespace uniep
