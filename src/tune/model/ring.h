#pragma once

#include <cstddef>
#include <vector>

namespace uniep::tune {

/// A short queue: the simulator has thousands, most of which never hold more than a few.
template <class T>
class Ring {
 public:
  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  T& front() { return items_[first_]; }
  const T& front() const { return items_[first_]; }
  T& operator[](std::size_t i) { return items_[(first_ + i) & (items_.size() - 1)]; }

  void push_back(const T& item) {
    if (size_ == items_.size()) grow();
    (*this)[size_++] = item;
  }
  void pop_front() {
    first_ = (first_ + 1) & (items_.size() - 1);
    --size_;
  }

 private:
  void grow() {
    std::vector<T> more(items_.empty() ? 4 : 2 * items_.size());  // a power of two
    for (std::size_t i = 0; i < size_; ++i) more[i] = (*this)[i];
    items_.swap(more);
    first_ = 0;
  }

  std::vector<T> items_;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

}  // namespace uniep::tune
