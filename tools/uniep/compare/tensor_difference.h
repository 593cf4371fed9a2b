#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors.h"

namespace uniep::tool {

/// An element that has not the same bits in two tensors.
struct DifferentElement {
  std::vector<std::int64_t> index;
  std::uint64_t a_bits = 0;
  std::uint64_t b_bits = 0;
};

/// How two tensors of one shape and type differ. -0 and +0 differ by a bit, and by nothing in
/// value; a NaN equals one of the same bits. Distances are those of the pairs of finite numbers.
struct TensorDifference {
  std::int64_t elements = 0;
  std::int64_t differing = 0;       ///< elements
  std::int64_t differing_bits = 0;  ///< in all of these
  std::int64_t not_finite = 0;      ///< of these, those of which one is NaN or infinite
  double largest = 0;               ///< |a - b|
  /// |a - b| / |a|, Euclidean: 0 where both are 0, infinite where only the denominator is.
  double relative_l2 = 0;
  std::optional<DifferentElement> first{};
};

/// Throws Error(kInvalidArgument) unless both have one shape and type.
TensorDifference difference_of(const io::Tensor& a, const io::Tensor& b);

/// "token 3, column 5", as the tensors of layers and results are indexed; of others "[3, 5]".
std::string place_text(const std::string& tensor, const std::vector<std::int64_t>& index);

/// "0.5 (0x3f00)"
std::string element_text(io::DType dtype, std::uint64_t bits);

}  // namespace uniep::tool
