#include "io/safetensors.h"

#include <array>
#include <bit>
#include <new>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/check.h"
#include "base/files.h"
#include "base/math.h"
#include "base/memory_info.h"
#include "base/output_file.h"
#include "io/safetensors_header.h"

namespace uniep::io {
namespace {

static_assert(std::endian::native == std::endian::little, "the format's numbers are used in place");

constexpr std::size_t kPrefixBytes = 8;  // the header's length, before the header

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void check_file_size(std::uint64_t file_size, const std::string& file) {
  require(file_size != 0, ErrorCode::kIo, file, ": is empty; a safetensors file is needed");
  require(file_size >= kPrefixBytes, ErrorCode::kIo, file, ": has only ", file_size,
          " bytes; a safetensors file, which starts with ", kPrefixBytes,
          " bytes of header length, is needed");
}

/// Refused before the data is read: a process that takes more than there is may be killed.
void check_free_memory(std::uint64_t file_size, const std::string& file) {
  constexpr double kCopies = 2;  // what is read, and the tensors that are made from it
  const double available = available_memory();
  require(available == 0 || kCopies * static_cast<double>(file_size) <= available, ErrorCode::kIo,
          file, ": has ", file_size, " bytes, of which ", kCopies, " copies do not fit into the ",
          static_cast<std::uint64_t>(available), " bytes of free memory; a smaller file is needed");
}

std::uint64_t header_length(std::span<const std::byte> prefix, std::uint64_t file_size,
                            const std::string& file) {
  std::uint64_t length = 0;
  std::memcpy(&length, prefix.data(), kPrefixBytes);
  require(length <= kMaxHeaderBytes, ErrorCode::kIo, file, ": the header length is ", length,
          "; up to ", kMaxHeaderBytes, " bytes are accepted (is it a safetensors file?)");
  require(length <= file_size - kPrefixBytes, ErrorCode::kIo, file, ": the header length is ",
          length, ", but only ", file_size - kPrefixBytes,
          " bytes follow it; a file that was not cut short is needed");
  return length;
}

TensorFile assemble(std::vector<HeaderEntry> entries, std::span<const std::byte> data,
                    std::string file) {
  TensorFile result;
  result.tensors.reserve(entries.size());
  for (HeaderEntry& entry : entries) {
    result.tensors.push_back({file, std::move(entry.name), entry.dtype, std::move(entry.shape),
                              data.subspan(entry.begin, entry.end - entry.begin)});
  }
  result.name = std::move(file);
  return result;
}

std::unique_ptr<std::byte[]> allocate(std::uint64_t bytes, const std::string& file) {
  try {
    return std::make_unique_for_overwrite<std::byte[]>(bytes);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kIo, cat(file, ": its ", bytes,
                                    " bytes do not fit into memory; a smaller file is needed"));
  }
}

/// What a caller may not ask to be written.
void check_writable(std::span<const Tensor> tensors) {
  std::unordered_set<std::string_view> names;
  for (const Tensor& tensor : tensors) {
    require(tensor.name != "__metadata__", ErrorCode::kInvalidArgument,
            "a tensor cannot be named '__metadata__'; the format keeps that name for itself");
    require(names.insert(tensor.name).second, ErrorCode::kInvalidArgument, "two tensors are named ",
            quote_name(tensor.name), "; every name may occur once in a file");
    require(tensor.shape.size() <= kMaxRank, ErrorCode::kInvalidArgument, "tensor ",
            quote_name(tensor.name), " has ", tensor.shape.size(), " dimensions; up to ", kMaxRank,
            " are accepted");
    const std::int64_t bytes = byte_size(tensor.dtype, tensor.shape);
    require(bytes == static_cast<std::int64_t>(tensor.bytes.size()), ErrorCode::kInvalidArgument,
            "tensor ", quote_name(tensor.name), " of shape ", shape_string(tensor.shape),
            " and dtype ", to_string(tensor.dtype), " has ", tensor.bytes.size(),
            " bytes, which its shape does not give");
  }
}

/// Length prefix and JSON, padded so that the data starts at a multiple of 8 bytes.
std::string format_header(std::span<const Tensor> tensors) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  std::size_t offset = 0;
  for (const Tensor& tensor : tensors) {
    const std::size_t end = offset + tensor.bytes.size();
    // push_back, as assigning through operator[] would search all earlier names.
    header.get_ref<nlohmann::ordered_json::object_t&>().emplace_back(
        tensor.name, nlohmann::ordered_json{{"dtype", to_string(tensor.dtype)},
                                            {"shape", tensor.shape},
                                            {"data_offsets", {offset, end}}});
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::type_error&) {
    throw Error(ErrorCode::kInvalidArgument, "a tensor's name is not UTF-8; the format needs that");
  }
  text.resize(round_up(text.size(), std::size_t{8}), ' ');
  require(text.size() <= kMaxHeaderBytes, ErrorCode::kInvalidArgument, "the header of ",
          tensors.size(), " tensors has ", text.size(), " bytes; up to ", kMaxHeaderBytes,
          " are accepted");
  const std::uint64_t length = text.size();
  std::string prefix(kPrefixBytes, '\0');
  std::memcpy(prefix.data(), &length, kPrefixBytes);
  return prefix + text;
}

/// A row for each DType, in its order.
struct DTypeRow {
  std::string_view name;
  std::int64_t size;
};
constexpr std::array<DTypeRow, kNumDTypes> kDTypeRows = {{{"BF16", 2},
                                                          {"F32", 4},
                                                          {"F64", 8},
                                                          {"I32", 4},
                                                          {"I64", 8},
                                                          {"F16", 2},
                                                          {"BOOL", 1},
                                                          {"U8", 1},
                                                          {"I8", 1},
                                                          {"U16", 2},
                                                          {"I16", 2},
                                                          {"U32", 4},
                                                          {"U64", 8},
                                                          {"F8_E4M3", 1},
                                                          {"F8_E5M2", 1}}};

const DTypeRow& row_of(DType dtype) { return kDTypeRows[static_cast<std::size_t>(dtype)]; }

}  // namespace

std::string_view to_string(DType dtype) { return row_of(dtype).name; }

std::int64_t size_of(DType dtype) { return row_of(dtype).size; }

std::string shape_string(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (const std::int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

void Tensor::require_dtype(DType wanted) const {
  require(dtype == wanted, ErrorCode::kIo, file, file.empty() ? "" : ": ", "tensor ",
          quote_name(name), " has dtype ", to_string(dtype), "; ", to_string(wanted), " is needed");
}

const Tensor* TensorFile::find(std::string_view tensor) const {
  for (const Tensor& candidate : tensors) {
    if (candidate.name == tensor) return &candidate;
  }
  return nullptr;
}

const Tensor& TensorFile::get(std::string_view tensor) const {
  if (const Tensor* found = find(tensor)) return *found;
  constexpr std::size_t kMaxListed = 12;
  std::string has;
  for (std::size_t i = 0; i < tensors.size() && i < kMaxListed; ++i) {
    has += cat(i ? ", " : "", quote_name(tensors[i].name));
  }
  if (tensors.size() > kMaxListed) has += ", ...";
  throw Error(ErrorCode::kIo, cat(name, ": has no tensor ", quote_name(tensor), "; it has ",
                                  has.empty() ? "none at all" : has));
}

TensorFile parse_safetensors(std::span<const std::byte> file, std::string_view name) {
  std::string shown = display_name(name);
  check_file_size(file.size(), shown);
  const std::uint64_t length = header_length(file, file.size(), shown);
  const auto header = file.subspan(kPrefixBytes, length);
  const auto data = file.subspan(kPrefixBytes + length);
  auto entries = parse_header(as_text(header), data.size(), shown);
  return assemble(std::move(entries), data, std::move(shown));
}

TensorFile read_safetensors(const std::filesystem::path& path) {
  InputFile file(path);
  check_file_size(file.size(), file.name());
  std::array<std::byte, kPrefixBytes> prefix{};
  file.read(prefix);
  const std::uint64_t length = header_length(prefix, file.size(), file.name());
  const auto header = allocate(length, file.name());
  file.read({header.get(), length});
  const std::uint64_t data_size = file.size() - kPrefixBytes - length;
  auto entries = parse_header(as_text({header.get(), length}), data_size, file.name());

  check_free_memory(file.size(), file.name());
  auto storage = allocate(data_size, file.name());
  const std::span<std::byte> data(storage.get(), data_size);
  file.read(data);
  TensorFile result = assemble(std::move(entries), data, file.name());
  result.storage = std::move(storage);
  return result;
}

std::vector<std::byte> serialize_safetensors(std::span<const Tensor> tensors) {
  check_writable(tensors);
  const std::string header = format_header(tensors);
  const auto head = std::as_bytes(std::span(header));
  std::vector<std::byte> file(head.begin(), head.end());
  for (const Tensor& tensor : tensors) {
    file.insert(file.end(), tensor.bytes.begin(), tensor.bytes.end());
  }
  return file;
}

void write_safetensors(const std::filesystem::path& path, std::span<const Tensor> tensors) {
  check_writable(tensors);
  const std::string header = format_header(tensors);
  std::vector<std::span<const std::byte>> parts = {std::as_bytes(std::span(header))};
  for (const Tensor& tensor : tensors) parts.push_back(tensor.bytes);
  write_atomically(path, parts);
}

}  // namespace uniep::io
