#include "compare/tensor_difference.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
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

/// The number that a sign, `exponent_bits` and `mantissa_bits` stand for. The greatest exponent is
/// that of infinity and NaN as in IEEE 754, or of numbers, too, and of one NaN.
double small_float(std::uint64_t bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const std::uint64_t one = std::uint64_t{1} << mantissa_bits;
  const auto greatest = (1 << exponent_bits) - 1;
  const auto exponent = static_cast<int>(bits >> mantissa_bits) & greatest;
  const std::uint64_t mantissa = bits & (one - 1);
  const int scale = std::max(exponent, 1) - greatest / 2 - mantissa_bits;
  double value = std::ldexp(static_cast<double>(mantissa + (exponent == 0 ? 0 : one)), scale);
  if (exponent == greatest && has_infinity) value = std::numeric_limits<double>::infinity();
  if (exponent == greatest && mantissa != 0 && (has_infinity || mantissa == one - 1)) {
    value = std::numeric_limits<double>::quiet_NaN();
  }
  return (bits >> (exponent_bits + mantissa_bits) & 1) != 0 ? -value : value;
}

/// The element as a number, in a type as wide as integers of 64 bits and squares of F64 need.
long double value_of(DType dtype, std::uint64_t bits) {
  switch (dtype) {
    case DType::kBf16:
      return to_float(bf16{static_cast<std::uint16_t>(bits)});
    case DType::kF32:
      return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    case DType::kF64:
      return std::bit_cast<double>(bits);
    case DType::kF16:
      return small_float(bits, 5, 10, true);
    case DType::kF8E4m3:
      return small_float(bits, 4, 3, false);
    case DType::kF8E5m2:
      return small_float(bits, 5, 2, true);
    case DType::kI8:
      return static_cast<std::int8_t>(bits);
    case DType::kI16:
      return static_cast<std::int16_t>(bits);
    case DType::kI32:
      return static_cast<std::int32_t>(bits);
    case DType::kI64:
      return static_cast<std::int64_t>(bits);
    case DType::kBool:
    case DType::kU8:
    case DType::kU16:
    case DType::kU32:
    case DType::kU64:
      break;
  }
  return bits;
}

/// Digits that tell two numbers of the type apart.
int digits_of(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
    case DType::kF8E4m3:
    case DType::kF8E5m2:
      return 4;
    case DType::kF16:
      return 5;
    case DType::kF32:
      return 9;
    case DType::kF64:
      return 17;
    default:
      return 20;  // integers, of up to 64 bits
  }
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
  const long double value = value_of(dtype, bits);
  if (std::isnan(value)) return "NaN";
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%.*Lg", digits_of(dtype), value);
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
