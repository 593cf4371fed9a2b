#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <utility>

namespace uniep {

/// How the matrices of a rank's experts, each [out, in] with rows contiguous, lie in memory.
enum class ExpertForm {
  kOneTensor,    ///< [El, 2I, H]: rows of the gate, then those of up; or [El, H, I]
  kInterleaved,  ///< [El, 2I, H]: rows of gate and up by turns, the gate's first
  kGateAndUp,    ///< two tensors [El, I, H]
  kOneEach,      ///< a tensor for each expert: [2I, H] as of one tensor, or [H, I]
};

/// A weight of a rank's experts, or its gradient: one tensor, or several that lie anywhere. They
/// are read and written where they are. Memory, and the list of `one_each`, is the caller's.
template <class T>
class ExpertMatrices {
 public:
  ExpertMatrices() = default;

  /// One contiguous tensor: what a span can be made of.
  template <class Tensor>
  requires(std::constructible_from<std::span<T>, Tensor&&>) ExpertMatrices(Tensor&& tensor)
      : first_(std::forward<Tensor>(tensor)) {}

  static ExpertMatrices interleaved(std::span<T> tensor) {
    ExpertMatrices m(tensor);
    m.form_ = ExpertForm::kInterleaved;
    return m;
  }
  static ExpertMatrices gate_and_up(std::span<T> gate, std::span<T> up) {
    ExpertMatrices m(gate);
    m.form_ = ExpertForm::kGateAndUp;
    m.up_ = up;
    return m;
  }
  static ExpertMatrices one_each(std::span<const std::span<T>> tensors) {
    ExpertMatrices m;
    m.form_ = ExpertForm::kOneEach;
    m.each_ = tensors;
    return m;
  }
  /// These tensors, with matrices that are [in, out]: [El, H, 2I] for [El, 2I, H], columns of gate
  /// and up for their rows; [El, I, H] for [El, H, I]. On the CUDA backend not interleaved, and a
  /// pair only if I is a multiple of 64.
  ExpertMatrices in_out() const {
    ExpertMatrices m = *this;
    m.in_out_ = true;
    return m;
  }

  ExpertForm form() const { return form_; }
  bool is_in_out() const { return in_out_; }
  /// All of it, or the gate's.
  std::span<T> tensor() const { return first_; }
  std::span<T> up() const { return up_; }
  std::span<const std::span<T>> each() const { return each_; }

  /// The beginning of the first matrix.
  T* data() const {
    if (form_ != ExpertForm::kOneEach) return first_.data();
    return each_.empty() ? nullptr : each_.front().data();
  }
  /// Elements of all matrices.
  std::size_t size() const {
    std::size_t count = first_.size() + up_.size();
    for (const std::span<T>& tensor : each_) count += tensor.size();
    return count;
  }
  bool empty() const { return size() == 0; }

 private:
  ExpertForm form_ = ExpertForm::kOneTensor;
  bool in_out_ = false;
  std::span<T> first_{};
  std::span<T> up_{};
  std::span<const std::span<T>> each_{};
};

}  // namespace uniep
