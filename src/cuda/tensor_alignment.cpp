#include "cuda/tensor_alignment.h"

#include <cstdint>

#include "base/check.h"
#include "layer/expert_places.h"

namespace uniep::cuda {
namespace {

constexpr std::uintptr_t kAlignment = 16;

template <class Tensor>
void check_tensor(const char* name, const Tensor& tensor) {
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data());
  require(tensor.empty() || address % kAlignment == 0, ErrorCode::kInvalidArgument, name,
          " starts at address ", address, "; with the cuda backend a multiple of ", kAlignment,
          " is accepted");
}

template <class T>
void check_tensor(const char* name, const ExpertMatrices<T>& matrices) {
  for_each_tensor(matrices, [&](std::span<T> tensor) { check_tensor(name, tensor); });
}

void check_tensor(const char* name, const WeightGrad& grad) {
  with_matrices(grad, [&](const auto& matrices) { check_tensor(name, matrices); });
}

}  // namespace

void check_alignment(const ForwardArgs& args) {
  check_tensor("x", args.x);
  check_tensor("w1", args.w1);
  check_tensor("w2", args.w2);
  check_tensor("b1", args.b1);
  check_tensor("b2", args.b2);
  check_tensor("shared_w1", args.shared_w1);
  check_tensor("shared_w2", args.shared_w2);
  check_tensor("out", args.out);
}

void check_alignment(const BackwardDataArgs& args) {
  check_tensor("dy", args.dy);
  check_tensor("w1", args.w1);
  check_tensor("w2", args.w2);
  check_tensor("b1", args.b1);
  check_tensor("b2", args.b2);
  check_tensor("shared_w1", args.shared_w1);
  check_tensor("shared_w2", args.shared_w2);
  check_tensor("dx", args.dx);
  check_tensor("x", args.x);
}

void check_alignment(const BackwardWeightsArgs& args) {
  check_tensor("dw1", args.dw1);
  check_tensor("dw2", args.dw2);
  check_tensor("db1", args.db1);
  check_tensor("db2", args.db2);
  check_tensor("dshared_w1", args.dshared_w1);
  check_tensor("dshared_w2", args.dshared_w2);
  check_tensor("dy", args.dy);
  check_tensor("x", args.x);
}

void check_alignment(const RowSums& sums) {
  const auto rows_at = [&](const bf16* begin, std::int64_t count) {
    return std::span(begin, static_cast<std::size_t>(count * sums.hidden));
  };
  check_tensor("rows", rows_at(sums.rows, sums.num_rows));
  check_tensor("more", rows_at(sums.more, sums.num_more));
  check_tensor("out", rows_at(sums.out, sums.tokens));
}

}  // namespace uniep::cuda
