#include "weights.h"

#include <string>

namespace uniep::ops {

Form form_of(const std::vector<Tensor>& tensors, bool interleaved) {
  if (tensors.empty() || tensors[0].dim() == 2) return Form::kEach;
  if (tensors.size() == 2) return Form::kPair;
  return interleaved ? Form::kInterleaved : Form::kOne;
}

Form form_of(std::int64_t number, const char* name, bool has_up) {
  const auto form = static_cast<Form>(number);
  const bool halved = form == Form::kInterleaved || form == Form::kPair;
  if (number < 0 || number > 3 || (halved && !has_up)) {
    refuse(std::string("the form of ") + name + " is " + std::to_string(number) +
           "; 0 (one tensor) and 3 (one for each expert) are accepted, and of w1 with a gate 1 " +
           "(interleaved) and 2 (gate and up)");
  }
  return form;
}

ExpertTensors::ExpertTensors(const std::vector<Tensor>& tensors, const char* name, ScalarType type,
                             const LayerShape& shape, const MatrixSize& size, bool interleaved,
                             const Tensor& key)
    : form_(form_of(tensors, interleaved)) {
  const std::int64_t experts = shape.local_experts;
  const auto count = static_cast<std::int64_t>(tensors.size());
  const bool each = form_ == Form::kEach;
  if (count != (each ? experts : form_ == Form::kPair ? 2 : 1)) {
    refuse(std::string(name) + " is a list of " + std::to_string(count) +
           " tensors; it must be one tensor, gate and up, or one for each of " +
           std::to_string(experts) + " experts");
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string own =
        count == 1 && !each ? name : std::string(name) + "[" + std::to_string(i) + "]";
    if (each) {
      require(tensors[i], own.c_str(), type, {size.rows, size.cols}, key);
    } else {
      require(tensors[i], own.c_str(), type, {experts, size.rows / count, size.cols}, key);
    }
    addresses_.push_back(const_cast<void*>(tensors[i].const_data_ptr()));
  }
}

std::vector<Tensor> empty_like_experts(Form form, const LayerShape& shape, const MatrixSize& size,
                                       const Tensor& beside) {
  std::vector<Tensor> tensors;
  const std::int64_t experts = shape.local_experts;
  if (form == Form::kEach) {
    for (std::int64_t i = 0; i < experts; ++i) {
      tensors.push_back(empty(beside, ScalarType::BFloat16, {size.rows, size.cols}));
    }
    return tensors;
  }
  const std::int64_t count = form == Form::kPair ? 2 : 1;
  for (std::int64_t i = 0; i < count; ++i) {
    tensors.push_back(empty(beside, ScalarType::BFloat16, {experts, size.rows / count, size.cols}));
  }
  return tensors;
}

}  // namespace uniep::ops
