#pragma once

#include <vector>

#include "schedule/dependencies.h"

namespace uniep::tune {

/// A counter of one rank: how far it has been advanced, and when the last of that is visible.
struct Counter {
  std::uint32_t seen = 0;
  int first_waiter = -1;  ///< unit, or -1
  double visible = 0;
};

/// The counters of one rank, by kind and index; of kPiece those that it has for each rank that it
/// stands in for.
class CounterTable {
 public:
  explicit CounterTable(const PassView& v) : layout_(v.layout) {
    std::int64_t total = 0;
    pieces_ = std::int64_t{v.num_pieces()} * v.num_ranks;
    for (int kind = 0; kind < kMaxCounterKinds; ++kind) {
      begin_[kind] = total;
      const CounterOf of = v.counters[kind].of;
      relayed_[kind] = of == CounterOf::kPiece && v.has_hosts();
      total += relayed_[kind] ? layout_.hosts * pieces_ : num_counters(v, of);
    }
    counters_.resize(static_cast<std::size_t>(total));
  }
  /// `owner`: the rank whose counter it is, if not this one's; this one stands in for it.
  Counter& at(CounterKind kind, std::int64_t index, int owner = -1) {
    if (relayed_[static_cast<int>(kind)]) index += layout_.host_of(owner) * pieces_;
    return counters_[static_cast<std::size_t>(begin_[static_cast<int>(kind)] + index)];
  }

 private:
  RankLayout layout_;
  std::int64_t pieces_ = 0;
  bool relayed_[kMaxCounterKinds] = {};
  std::int64_t begin_[kMaxCounterKinds] = {};
  std::vector<Counter> counters_;
};

}  // namespace uniep::tune
