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

/// The counters of one rank, by kind and index.
class CounterTable {
 public:
  explicit CounterTable(const PassView& v) {
    std::int64_t total = 0;
    for (int kind = 0; kind < kMaxCounterKinds; ++kind) {
      begin_[kind] = total;
      total += num_counters(v, v.counters[kind].of);
    }
    counters_.resize(static_cast<std::size_t>(total));
  }
  Counter& at(CounterKind kind, std::int64_t index) {
    return counters_[static_cast<std::size_t>(begin_[static_cast<int>(kind)] + index)];
  }

 private:
  std::int64_t begin_[kMaxCounterKinds] = {};
  std::vector<Counter> counters_;
};

}  // namespace uniep::tune
