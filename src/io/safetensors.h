#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "uniep/bf16.h"

namespace uniep::io {

/// A longer header is refused, as the format's reference implementation does.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

/// Most dimensions of a tensor.
inline constexpr std::size_t kMaxRank = 8;

/// The element types of whole bytes that the format has; this library reads and writes the first
/// five.
enum class DType {
  kBf16,
  kF32,
  kF64,
  kI32,
  kI64,
  kF16,
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kU64,
  kF8E4m3,
  kF8E5m2
};
inline constexpr int kNumDTypes = static_cast<int>(DType::kF8E5m2) + 1;

/// The format's own name, such as "BF16".
std::string_view to_string(DType dtype);

/// Bytes of one element.
std::int64_t size_of(DType dtype);

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, bf16>) return DType::kBf16;
  if constexpr (std::is_same_v<T, float>) return DType::kF32;
  if constexpr (std::is_same_v<T, double>) return DType::kF64;
  if constexpr (std::is_same_v<T, std::int32_t>) return DType::kI32;
  if constexpr (std::is_same_v<T, std::int64_t>) return DType::kI64;
}

/// "[2048, 256]"
std::string shape_string(std::span<const std::int64_t> shape);

/// A named array whose bytes belong to someone else: the TensorFile it was read from, or the caller
/// who wants it written.
struct Tensor {
  std::string file;  ///< where it was read from, for error texts; empty when it is to be written
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  ///< little-endian, row-major, not necessarily aligned

  std::int64_t num_elements() const {
    return static_cast<std::int64_t>(bytes.size()) / size_of(dtype);
  }

  /// Throws Error(kIo) unless the elements are of this type.
  void require_dtype(DType wanted) const;

  /// The elements, copied, as the format does not align them. Error(kIo) for another T than
  /// dtype's.
  template <class T>
  std::vector<T> as() const {
    require_dtype(dtype_of<T>());
    std::vector<T> values(static_cast<std::size_t>(num_elements()));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
};

/// A tensor to be written; `values` must outlive it.
template <class T>
Tensor make_tensor(std::string name, std::vector<std::int64_t> shape, std::span<const T> values) {
  return {"", std::move(name), dtype_of<T>(), std::move(shape), std::as_bytes(values)};
}

/// What a safetensors file holds, in the order of its header.
struct TensorFile {
  std::string name;  ///< of the file, for error texts
  std::vector<Tensor> tensors;
  std::unique_ptr<std::byte[]> storage;  ///< the bytes, where this object owns them

  /// Null where there is none.
  const Tensor* find(std::string_view tensor) const;
  /// Throws Error(kIo) that lists the names where there is none.
  const Tensor& get(std::string_view tensor) const;
};

/// Understands a whole file in memory; the tensors point into `file`, which must outlive them.
/// Anything that the format does not allow is an Error(kIo): one sentence that names the file, the
/// tensor, what was found and what would be accepted. Memory use is in proportion to the file.
TensorFile parse_safetensors(std::span<const std::byte> file, std::string_view name);

/// `parse_safetensors` of a file, which is only read past its header if the header is right.
TensorFile read_safetensors(const std::filesystem::path& path);

/// The bytes of a file with these tensors in this order. The same tensors give the same bytes.
/// Error(kInvalidArgument) for duplicate names or a shape that does not fit the bytes.
std::vector<std::byte> serialize_safetensors(std::span<const Tensor> tensors);

/// Writes what `serialize_safetensors` returns, without building it in memory. Atomic: after an
/// Error(kIo) the path holds what it held before.
void write_safetensors(const std::filesystem::path& path, std::span<const Tensor> tensors);

}  // namespace uniep::io
