#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "group/heap.h"
#include "layout/workspace.h"
#include "schedule/dependencies.h"

namespace uniep::cpu {

/// The counters of one layer on one rank and, for signals, those of its peers. See docs/counters.md
/// for the protocol and its memory ordering.
class Counters {
 public:
  /// All counters start at `first_count`, which must be the same on every rank. Those of this
  /// rank's tasks lie in `local`, LocalCounterLayout bytes in which they may stand anywhere; null:
  /// in memory of their own. `heaps` has, for ranks of other hosts, the memory that stands in for
  /// theirs on this one.
  Counters(const Problem& problem, int rank, std::vector<std::shared_ptr<Heap>> heaps,
           std::uint32_t first_count = 0, std::byte* local = nullptr, int hosts = 1);

  /// Notes where the counters stand, so that the pass counts from there; nothing is ever cleared.
  /// Every signal of earlier passes has arrived by now, and none of this pass comes before this
  /// rank has published its tokens.
  void begin_pass(const PassView& view);
  /// Behind the last task of a pass, whose relays have seen all that was pushed to them.
  void end_pass(const PassView& view);

  /// Count above the pass's base, acquiring what was released with the signals seen. `owner`: whose
  /// counter; -1: this rank's.
  std::uint32_t seen(CounterKind kind, std::int64_t index, int owner = -1) const {
    if (owner < 0) owner = rank_;
    const std::uint32_t value =
        std::atomic_ref(*counter(kind, owner, index)).load(std::memory_order_acquire);
    return value - base(kind, index, owner);
  }

  /// The counter's address; only those in symmetric memory exist for other ranks than this.
  std::uint32_t* counter(CounterKind kind, int rank, std::int64_t index) const;

  /// Where a rank's counter lies in the memory of that rank.
  std::int64_t offset(CounterKind kind, int rank, std::int64_t index) const;

  const std::shared_ptr<Heap>& heap_of(int rank) const {
    return heaps_[static_cast<std::size_t>(rank)];
  }

 private:
  std::uint32_t base(CounterKind kind, std::int64_t index, int owner) const;
  void snapshot(CounterKind kind, std::int64_t count);
  void count_crossings(const PassView& view);
  bool stands_in(int rank) const;  // this rank's memory for that one's

  const int rank_;
  const RankLayout layout_;
  const SymmetricLayout symmetric_;
  const LocalCounterLayout local_;
  std::vector<std::shared_ptr<Heap>> heaps_;
  std::unique_ptr<Heap> local_heap_;
  std::uint32_t passes_;  // begun, this one included; from first_count on, equal on all ranks
  std::vector<std::uint32_t> bases_[kNumCounterKinds];  // of all but those of kSource
  // Where `crossed`, which peers may raise before this rank has begun the pass, stands behind it:
  // the routing of all ranks says what each source raises.
  std::vector<std::uint32_t> crossed_;
  // Of `pushed` of ranks that this one stands in for, by rank: likewise, so as the last pass left
  // them.
  std::vector<std::vector<std::uint32_t>> relayed_;
};

/// Adds to a counter, releasing everything that the caller has written before.
inline void add(std::uint32_t* counter, std::uint32_t amount) {
  std::atomic_ref(*counter).fetch_add(amount, std::memory_order_release);
}

}  // namespace uniep::cpu
