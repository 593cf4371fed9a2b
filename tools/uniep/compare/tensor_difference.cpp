#include "compare/tensor_difference.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "base/check.h"

namespace uniep::tool {
namespace {

using io::DType;

std::uint64_t bits_at(const io::Tensor& tensor, std::int64_t i) {
  const auto size = static_cast<std::size_t>(io::size_of(tensor.dtype));
  std::uint64_t bits = 0;  // the file is little-endian, as this machine is
  std::memcpy(&bits, tensor.bytes.data() + static_cast<std::size_t>(i) * size, size);
  return bits;
}

/// As wide as integers of 64 bits and squares of F64 need.
long double value_of(DType dtype, std::uint64_t bits) {
  switch (dtype) {
    case DType::kBf16:
      return to_float(bf16{static_cast<std::uint16_t>(bits)});
    case DType::kF32:
      return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    case DType::kF64:
      return std::bit_cast<double>(bits);
    case DType::kI32:
      return static_cast<std::int32_t>(bits);
    case DType::kI64:
      break;
  }
  return static_cast<std::int64_t>(bits);
}

std::vector<std::int64_t> index_of(const std::vector<std::int64_t>& shape, std::int64_t i) {
  std::vector<std::int64_t> index(shape.size());
  for (std::size_t d = shape.size(); d-- > 0; i /= shape[d]) index[d] = i % shape[d];
  return index;
}

void note_different(TensorDifference& d, const io::Tensor& tensor, std::int64_t i,
                    std::uint64_t a_bits, std::uint64_t b_bits) {
  if (d.differing++ == 0) d.first = {index_of(tensor.shape, i), a_bits, b_bits};
  d.differing_bits += std::popcount(a_bits ^ b_bits);
}

/// The names of a tensor's dimensions, in its order.
std::vector<std::string_view> axes_of(std::string_view tensor) {
  constexpr std::array<std::string_view, 4> kOfTokens = {"x", "dy", "out", "dx"};
  constexpr std::array<std::string_view, 3> kOfSlots = {"topk_ids", "topk_probs", "dprobs"};
  constexpr std::array<std::string_view, 4> kOfExperts = {"w1", "w2", "dw1", "dw2"};
  if (std::ranges::count(kOfTokens, tensor) > 0) return {"token", "column"};
  if (std::ranges::count(kOfSlots, tensor) > 0) return {"token", "slot"};
  if (std::ranges::count(kOfExperts, tensor) > 0) return {"expert", "row", "column"};
  return {};
}

std::string value_text(DType dtype, std::uint64_t bits) {
  if (dtype == DType::kI64) return cat(static_cast<std::int64_t>(bits));
  const auto value = static_cast<double>(value_of(dtype, bits));
  if (std::isnan(value)) return "NaN";
  std::array<char, 40> text{};  // as many digits as tell two numbers of the type apart
  const int digits = dtype == DType::kF64 ? 17 : dtype == DType::kBf16 ? 4 : 9;
  std::snprintf(text.data(), text.size(), "%.*g", dtype == DType::kI32 ? 10 : digits, value);
  return text.data();
}

}  // namespace

TensorDifference difference_of(const io::Tensor& a, const io::Tensor& b) {
  require(a.dtype == b.dtype && a.shape == b.shape, ErrorCode::kInvalidArgument,
          "comparing tensors of different shapes or types");
  TensorDifference d{.elements = a.num_elements()};
  long double error = 0;
  long double norm = 0;
  for (std::int64_t i = 0; i < d.elements; ++i) {
    const std::uint64_t a_bits = bits_at(a, i);
    const std::uint64_t b_bits = bits_at(b, i);
    const bool differs = a_bits != b_bits;
    if (differs) note_different(d, a, i, a_bits, b_bits);
    const long double x = value_of(a.dtype, a_bits);
    const long double y = value_of(b.dtype, b_bits);
    if (!std::isfinite(x) || !std::isfinite(y)) {
      d.not_finite += differs;
      continue;
    }
    error += (x - y) * (x - y);
    norm += x * x;
    d.largest = std::max(d.largest, static_cast<double>(std::abs(x - y)));
  }
  d.relative_l2 = error == 0 ? 0 : static_cast<double>(std::sqrt(error / norm));
  return d;
}

std::string place_text(const std::string& tensor, const std::vector<std::int64_t>& index) {
  const auto axes = axes_of(tensor);
  if (axes.size() != index.size()) return io::shape_string(index);
  std::string text;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    text += cat(i == 0 ? "" : ", ", axes[i], ' ', index[i]);
  }
  return text;
}

std::string element_text(DType dtype, std::uint64_t bits) {
  std::array<char, 24> hex{};
  std::snprintf(hex.data(), hex.size(), "0x%0*llx", static_cast<int>(2 * io::size_of(dtype)),
                static_cast<unsigned long long>(bits));
  return cat(value_text(dtype, bits), " (", hex.data(), ')');
}

}  // namespace uniep::tool
