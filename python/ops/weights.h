#pragma once

#include <cstdint>
#include <vector>

#include "call.h"
#include "tensors.h"

namespace uniep::ops {

/// The tensors that a weight of experts, or its gradient, lies in. Python has the same numbers
/// (_forms.py).
enum class Form : std::int64_t {
  kOne = 0,   ///< [El, rows, columns]
  kPair = 1,  ///< of w1: gate and up, [El, rows / 2, columns] each
  kEach = 2,  ///< [rows, columns] for each expert
};

/// How matrices lie in their tensors; of all weights and gradients of a call.
struct Layout {
  bool interleaved = false;  ///< of a w1 that is one tensor: rows of gate and up by turns
  bool in_out = false;       ///< columns before rows
};

/// The layout by the sum that Python gave: 1 (interleaved), 2 (in_out).
Layout layout_of(std::int64_t number);

/// Rows and columns of a weight of one expert.
struct MatrixSize {
  std::int64_t rows;
  std::int64_t cols;
};
inline MatrixSize size_of_w1(const LayerShape& s) { return {s.h_width, s.hidden}; }
inline MatrixSize size_of_w2(const LayerShape& s) { return {s.hidden, s.intermediate}; }
/// Whether w1 has rows of gate and up, which may lie in two tensors.
inline bool has_up(const LayerShape& s) { return s.h_width == 2 * s.intermediate; }

/// The tensors of a weight or its gradient, checked, and what the C API takes of them.
class ExpertTensors {
 public:
  ExpertTensors(const std::vector<Tensor>& tensors, const char* name, ScalarType type,
                const LayerShape& shape, const MatrixSize& size, bool may_be_pair,
                const Layout& layout, const Tensor& key);

  // As the C API has them.
  void* one() const { return form_ == Form::kEach ? nullptr : addresses_[0]; }
  void* up() const { return form_ == Form::kPair ? addresses_[1] : nullptr; }
  void* const* each() const { return form_ == Form::kEach ? addresses_.data() : nullptr; }
  bool is_one() const { return form_ == Form::kOne; }

 private:
  Form form_;
  std::vector<void*> addresses_;
};

/// w1 and w2 of a forward or backward call.
struct Weights {
  ExpertTensors w1, w2;
  Layout layout;

  Weights(const std::vector<Tensor>& first, const std::vector<Tensor>& second,
          const LayerShape& shape, const Layout& lie, const Tensor& key)
      : w1(first, "w1", ScalarType::BFloat16, shape, size_of_w1(shape), has_up(shape), lie, key),
        w2(second, "w2", ScalarType::BFloat16, shape, size_of_w2(shape), false, lie, key),
        layout(lie) {}

  template <class Arguments>
  void set(Arguments& arguments) const {
    arguments.w1 = w1.one();
    arguments.w3 = w1.up();
    arguments.w1_each = w1.each();
    arguments.interleaved = layout.interleaved && w1.is_one();
    arguments.in_out = layout.in_out;
    arguments.w2 = w2.one();
    arguments.w2_each = w2.each();
  }
};

/// dw1 and dw2 of a backward call.
struct Gradients {
  ExpertTensors dw1, dw2;
  Layout layout;

  Gradients(const std::vector<Tensor>& first, const std::vector<Tensor>& second, ScalarType type,
            const LayerShape& shape, const Layout& lie, const Tensor& key)
      : dw1(first, "the gradient of w1", type, shape, size_of_w1(shape), has_up(shape), lie, key),
        dw2(second, "the gradient of w2", type, shape, size_of_w2(shape), false, lie, key),
        layout(lie) {}

  void set(uniep_backward_call& arguments) const {
    arguments.dw1 = dw1.one();
    arguments.dw3 = dw1.up();
    arguments.dw1_each = dw1.each();
    arguments.dw_interleaved = layout.interleaved && dw1.is_one();
    arguments.dw_in_out = layout.in_out;
    arguments.dw2 = dw2.one();
    arguments.dw2_each = dw2.each();
  }
};

/// New tensors of a bf16 gradient.
std::vector<Tensor> empty_like_experts(Form form, const Layout& layout, const LayerShape& shape,
                                       const MatrixSize& size, const Tensor& beside);

Form form_of(const std::vector<Tensor>& tensors);
/// The form by the number that Python gave.
Form form_of(std::int64_t number, const char* name, bool has_up);

}  // namespace uniep::ops
