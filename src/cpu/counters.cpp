#include "cpu/counters.h"

#include <algorithm>
#include <span>

namespace uniep::cpu {

namespace {

/// The counters from `offset` to the heap's end.
std::span<std::uint32_t> counters_from(const Heap& heap, std::int64_t offset) {
  return {reinterpret_cast<std::uint32_t*>(heap.data() + offset),
          static_cast<std::size_t>(heap.bytes() - offset) / sizeof(std::uint32_t)};
}

std::unique_ptr<Heap> local_heap(std::byte* memory, std::int64_t bytes) {
  if (memory == nullptr) return std::make_unique<Heap>(bytes);
  return std::make_unique<Heap>(memory, bytes, nullptr);
}

}  // namespace

Counters::Counters(const Problem& problem, int rank, std::vector<std::shared_ptr<Heap>> heaps,
                   std::uint32_t first_count, std::byte* local)
    : rank_(rank),
      symmetric_(problem, static_cast<int>(heaps.size())),
      local_(problem, static_cast<int>(heaps.size())),
      heaps_(std::move(heaps)),
      local_heap_(local_heap(local, local_.bytes)),
      passes_(first_count) {
  if (first_count == 0) return;  // as heaps are
  std::ranges::fill(counters_from(*local_heap_, 0), first_count);
  // These come last in the heap. No peer touches them before this rank has entered a pass.
  std::ranges::fill(counters_from(*heap_of(rank_), symmetric_.first_counter), first_count);
}

std::uint32_t* Counters::counter(CounterKind kind, int rank, std::int64_t index) const {
  std::byte* first = is_symmetric(kind) ? heap_of(rank)->data() + symmetric_[kind]
                                        : local_heap_->data() + local_[kind];
  return reinterpret_cast<std::uint32_t*>(first) + index;
}

std::uint32_t Counters::base(CounterKind kind, std::int64_t index) const {
  // A peer may publish before this rank has begun the pass, so `published` is not noted: it rises
  // by one a pass, and stood at the number of passes before this one.
  if (kLayerGraph[kind].of == CounterOf::kSource) return passes_ - 1;
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
  for (int i = 0; i < kLayerGraph.num_counters; ++i) {
    const CounterRow& row = kLayerGraph.counters[i];
    if (row.of != CounterOf::kSource) snapshot(row.kind, num_counters(v, row.of));
  }
}

}  // namespace uniep::cpu
