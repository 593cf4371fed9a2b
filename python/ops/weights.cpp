#include "weights.h"

#include <string>

namespace uniep::ops {

namespace {

/// The size as a tensor of the layout has it.
MatrixSize lying(const Layout& layout, const MatrixSize& size) {
  return layout.in_out ? MatrixSize{size.cols, size.rows} : size;
}

/// The size of each of so many tensors: one, or gate and up.
MatrixSize part_of(const MatrixSize& size, std::int64_t count) {
  return {size.rows / count, size.cols};
}

}  // namespace

Layout layout_of(std::int64_t number) {
  if (number < 0 || number > 3) {
    refuse("layout is " + std::to_string(number) +
           "; it must be a sum of 1 (interleaved) and 2 (in_out), or 0");
  }
  return {.interleaved = (number & 1) != 0, .in_out = (number & 2) != 0};
}

Form form_of(const std::vector<Tensor>& tensors) {
  if (tensors.empty() || tensors[0].dim() == 2) return Form::kEach;
  return tensors.size() == 2 ? Form::kPair : Form::kOne;
}

Form form_of(std::int64_t number, const char* name, bool has_up) {
  const auto form = static_cast<Form>(number);
  if (number < 0 || number > 2 || (form == Form::kPair && !has_up)) {
    refuse(std::string("the form of ") + name + " is " + std::to_string(number) +
           "; 0 (one tensor) and 2 (one for each expert) are accepted, and of w1 with a gate 1 " +
           "(gate and up)");
  }
  return form;
}

ExpertTensors::ExpertTensors(const std::vector<Tensor>& tensors, const char* name, ScalarType type,
                             const LayerShape& shape, const MatrixSize& size, bool may_be_pair,
                             const Layout& layout, const Tensor& key)
    : form_(form_of(tensors)) {
  const std::int64_t experts = shape.local_experts;
  const auto count = static_cast<std::int64_t>(tensors.size());
  const bool each = form_ == Form::kEach;
  const std::int64_t most = may_be_pair ? 2 : 1;
  if (count != (each ? experts : form_ == Form::kPair ? most : 1)) {
    refuse(std::string(name) + " is a list of " + std::to_string(count) +
           " tensors; it must be one tensor, " + (may_be_pair ? "gate and up, " : "") +
           "or one for each of " + std::to_string(experts) + " experts");
  }
  const auto [rows, cols] = lying(layout, each ? size : part_of(size, count));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string own =
        count == 1 && !each ? name : std::string(name) + "[" + std::to_string(i) + "]";
    if (each) {
      require(tensors[i], own.c_str(), type, {rows, cols}, key);
    } else {
      require(tensors[i], own.c_str(), type, {experts, rows, cols}, key);
    }
    addresses_.push_back(const_cast<void*>(tensors[i].const_data_ptr()));
  }
}

std::vector<Tensor> empty_like_experts(Form form, const Layout& layout, const LayerShape& shape,
                                       const MatrixSize& size, const Tensor& beside) {
  std::vector<Tensor> tensors;
  const std::int64_t experts = shape.local_experts;
  if (form == Form::kEach) {
    const auto [rows, cols] = lying(layout, size);
    for (std::int64_t i = 0; i < experts; ++i) {
      tensors.push_back(empty(beside, ScalarType::BFloat16, {rows, cols}));
    }
    return tensors;
  }
  const std::int64_t count = form == Form::kPair ? 2 : 1;
  const auto [rows, cols] = lying(layout, part_of(size, count));
  for (std::int64_t i = 0; i < count; ++i) {
    tensors.push_back(empty(beside, ScalarType::BFloat16, {experts, rows, cols}));
  }
  return tensors;
}

}  // namespace uniep::ops
