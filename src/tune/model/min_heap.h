#pragma once

#include <cstddef>
#include <vector>

namespace uniep::tune {

/// A priority queue whose smallest element is on top. `T::before` decides; no two elements are
/// alike. As std::priority_queue, but which child is smaller is computed, not branched on: nobody
/// can predict it, and the simulator asks for little else.
template <class T>
class MinHeap {
 public:
  bool empty() const { return items_.empty(); }
  std::size_t size() const { return items_.size(); }
  const T& top() const { return items_.front(); }

  void push(const T& item) {
    items_.push_back(item);
    rise(items_.size() - 1, item);
  }

  void pop() {
    const T last = items_.back();
    items_.pop_back();
    if (items_.empty()) return;
    // The hole sinks to the bottom, where the last element, being large, belongs or nearly so.
    const std::size_t count = items_.size();
    std::size_t hole = 0;
    std::size_t child = 2;
    for (; child < count; child = 2 * hole + 2) {
      child -= static_cast<std::size_t>(items_[child - 1].before(items_[child]));
      items_[hole] = items_[child];
      hole = child;
    }
    if (child == count) {
      items_[hole] = items_[count - 1];
      hole = count - 1;
    }
    rise(hole, last);
  }

 private:
  void rise(std::size_t hole, const T& item) {
    while (hole > 0 && item.before(items_[(hole - 1) / 2])) {
      items_[hole] = items_[(hole - 1) / 2];
      hole = (hole - 1) / 2;
    }
    items_[hole] = item;
  }

  std::vector<T> items_;
};

}  // namespace uniep::tune
