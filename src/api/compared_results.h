#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "uniep/backend.h"
#include "uniep/layer.h"

namespace uniep {

/// The caller's tensors that a pass writes, where the backend has them, while passes under many
/// schedules are run: all must leave the same bits there.
class ComparedResults {
 public:
  explicit ComparedResults(Backend backend) : backend_(backend) {}
  ComparedResults(const ComparedResults&) = delete;
  ComparedResults& operator=(const ComparedResults&) = delete;
  /// Restores, if that can still be done, what was held and is not restored.
  ~ComparedResults();

  /// A tensor that a pass overwrites.
  template <class T>
  void add(std::span<T> tensor) {
    add(std::as_writable_bytes(tensor), sizeof(T), false);
  }
  /// A weight gradient, which a pass may also add to.
  void add(const WeightGrad& grad);

  /// Keeps what is added to, behind all that the caller has put on any stream, and makes room for
  /// what is to be expected.
  void hold();
  /// Makes all as it has to be before a pass: NaNs, so that what a pass forgets to write shows, or
  /// the values that are added to.
  void prepare();
  /// What is there now is what every pass must leave.
  void expect_this();
  /// Elements that differ from that in any bit.
  std::int64_t count_differing() const;
  /// Gradients that are added to get the values that they had at first.
  void restore();

 private:
  struct Tensor {
    std::span<std::byte> bytes;
    std::size_t width;  // of an element
    bool added_to;
    std::vector<std::byte> before{};  // of one that is added to
    std::vector<std::byte> expected{};
  };
  void add(std::span<std::byte> bytes, std::size_t width, bool added_to);

  Backend backend_;
  std::vector<Tensor> tensors_;
  bool held_ = false;
};

}  // namespace uniep
