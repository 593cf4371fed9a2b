#include "cuda/tensor_alignment.h"

#include <cstdint>

#include "base/check.h"

namespace uniep::cuda {
namespace {

constexpr std::uintptr_t kAlignment = 16;

template <class T>
void check_alignment(const char* name, std::span<T> tensor) {
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data());
  require(tensor.empty() || address % kAlignment == 0, ErrorCode::kInvalidArgument, name,
          " starts at address ", address, "; with the cuda backend a multiple of ", kAlignment,
          " is accepted");
}

void check_alignment(const char* name, const WeightGrad& grad) {
  std::visit([&](const auto& span) { check_alignment(name, span); }, grad);
}

}  // namespace

void check_alignment(const ForwardArgs& args) {
  check_alignment("x", args.x);
  check_alignment("w1", args.w1);
  check_alignment("w2", args.w2);
  check_alignment("out", args.out);
}

void check_alignment(const BackwardDataArgs& args) {
  check_alignment("dy", args.dy);
  check_alignment("w1", args.w1);
  check_alignment("w2", args.w2);
  check_alignment("dx", args.dx);
}

void check_alignment(const BackwardWeightsArgs& args) {
  check_alignment("dw1", args.dw1);
  check_alignment("dw2", args.dw2);
}

}  // namespace uniep::cuda
