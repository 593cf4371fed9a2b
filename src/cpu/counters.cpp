#include "cpu/counters.h"

#include "base/check.h"

namespace uniep::cpu {

Counters::Counters(const Problem& problem, int rank, std::vector<std::shared_ptr<Heap>> heaps)
    : rank_(rank),
      symmetric_(problem, static_cast<int>(heaps.size())),
      local_(problem, static_cast<int>(heaps.size())),
      heaps_(std::move(heaps)),
      local_heap_(local_.bytes) {}

std::uint32_t* Counters::counter(CounterKind kind, int rank, std::int64_t index) const {
  const auto at = [&](const Heap& heap, std::int64_t offset) {
    return reinterpret_cast<std::uint32_t*>(heap.data() + offset) + index;
  };
  switch (kind) {
    case CounterKind::kPublished:
      return at(*heap_of(rank), symmetric_.published);
    case CounterKind::kArrived:
      return at(*heap_of(rank), symmetric_.arrived);
    case CounterKind::kRowsReady:
      return at(local_heap_, local_.rows_ready);
    case CounterKind::kTileDone:
      return at(local_heap_, local_.tile_done);
    default:
      return at(local_heap_, local_.expert_done);
  }
}

std::uint32_t Counters::base(CounterKind kind, std::int64_t index) const {
  // A peer may publish before this rank has begun the pass, so `published` is not noted: it rises
  // by one a pass, and stood at the number of passes before this one.
  if (kind == CounterKind::kPublished) return passes_ - 1;
  return bases_[static_cast<int>(kind)][static_cast<std::size_t>(index)];
}

void Counters::snapshot(CounterKind kind, std::int64_t count) {
  auto& bases = bases_[static_cast<int>(kind)];
  bases.resize(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    bases[static_cast<std::size_t>(i)] =
        std::atomic_ref(*counter(kind, rank_, i)).load(std::memory_order_relaxed);
  }
}

void Counters::begin_pass(const PassView& v) {
  ++passes_;
  snapshot(CounterKind::kRowsReady,
           ceil_div<std::int64_t>(v.segment_begin[v.num_local_experts], v.rows_per_counter()));
  snapshot(CounterKind::kTileDone, v.tile_begin[v.num_blocks()]);
  snapshot(CounterKind::kExpertDone, v.num_local_experts);
  snapshot(CounterKind::kArrived, v.num_token_blocks() * v.num_ranks);
}

void Counters::publish() {
  for (int r = 0; r < static_cast<int>(heaps_.size()); ++r) {
    add(counter(CounterKind::kPublished, r, rank_), 1);
  }
}

}  // namespace uniep::cpu
