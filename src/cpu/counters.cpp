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
                   std::uint32_t first_count, std::byte* local, int hosts)
    : rank_(rank),
      layout_(layout_of_hosts(static_cast<int>(heaps.size()), hosts)),
      symmetric_(problem, static_cast<int>(heaps.size()), kLayerGraph, hosts),
      local_(problem, static_cast<int>(heaps.size())),
      heaps_(std::move(heaps)),
      local_heap_(local_heap(local, local_.bytes)),
      passes_(first_count) {
  const Extents extents = extents_of(problem, layout_.ranks(), 0, hosts);
  const auto counters = [&](CounterOf of) {
    return static_cast<std::size_t>(counters_of(of, extents));
  };
  crossed_.assign(counters(CounterOf::kCrossing), first_count);
  relayed_.resize(heaps_.size());
  for (int r = 0; r < layout_.ranks(); ++r) {
    if (r == rank || !stands_in(r)) continue;
    relayed_[static_cast<std::size_t>(r)].assign(counters(CounterOf::kPiece), first_count);
  }
  if (first_count == 0) return;  // as heaps are
  std::ranges::fill(counters_from(*local_heap_, 0), first_count);
  // These come last in the heap. No peer touches them before this rank has entered a pass.
  for (int r = 0; r < layout_.ranks(); ++r) {
    if (!stands_in(r)) continue;
    std::ranges::fill(counters_from(*heap_of(r), symmetric_.first_counter), first_count);
  }
}

bool Counters::stands_in(int rank) const {
  return layout_.relay(rank, layout_.host_of(rank_)) == rank_;
}

std::uint32_t* Counters::counter(CounterKind kind, int rank, std::int64_t index) const {
  std::byte* first = is_symmetric(kind) ? heap_of(rank)->data() + symmetric_[kind]
                                        : local_heap_->data() + local_[kind];
  return reinterpret_cast<std::uint32_t*>(first) + index;
}

std::int64_t Counters::offset(CounterKind kind, int rank, std::int64_t index) const {
  return layout_.host_of(rank) * symmetric_.bytes + symmetric_[kind] +
         index * static_cast<std::int64_t>(sizeof(std::uint32_t));
}

std::uint32_t Counters::base(CounterKind kind, std::int64_t index, int owner) const {
  // A peer may publish before this rank has begun the pass, so `published` is not noted: it rises
  // by one a pass, and stood at the number of passes before this one.
  if (kLayerGraph[kind].of == CounterOf::kSource) return passes_ - 1;
  const auto& bases =
      owner == rank_ ? bases_[static_cast<int>(kind)] : relayed_[static_cast<std::size_t>(owner)];
  return bases[static_cast<std::size_t>(index)];
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
    if (row.of == CounterOf::kSource || row.of == CounterOf::kCrossing) continue;
    snapshot(row.kind, num_counters(v, row.of));
  }
  if (v.has_hosts()) count_crossings(v);
}

void Counters::count_crossings(const PassView& v) {
  bases_[static_cast<int>(CounterKind::kCrossed)] = crossed_;
  for (int source = 0; source < v.num_ranks; ++source) {
    for (int piece = 0; piece < v.num_pieces(); ++piece) {
      crossed_[static_cast<std::size_t>(v.crossing_index(source, piece))] +=
          v.crossing_tokens(source, piece);
    }
  }
}

void Counters::end_pass(const PassView& v) {
  for (int r = 0; r < layout_.ranks(); ++r) {
    if (r == rank_ || !stands_in(r)) continue;
    auto& bases = relayed_[static_cast<std::size_t>(r)];
    for (std::int64_t i = 0; i < std::int64_t{v.num_pieces()} * v.num_ranks; ++i) {
      bases[static_cast<std::size_t>(i)] =
          std::atomic_ref(*counter(CounterKind::kPushed, r, i)).load(std::memory_order_relaxed);
    }
  }
}

}  // namespace uniep::cpu
