// Whatever bytes come in: parse_safetensors refuses them with one readable Error(kIo), or returns
// tensors that cover the data exactly and survive being written and read again.
#include <cstdint>
#include <cstring>

#include "fuzz/fuzz_util.h"
#include "io/safetensors.h"

namespace uniep::fuzz {
namespace {

void check_tensors(const io::TensorFile& file) {
  for (const io::Tensor& t : file.tensors) {
    std::int64_t elements = 1;
    for (const std::int64_t size : t.shape) elements *= size;
    expect(elements == t.num_elements(), "shape and bytes agree");
    expect(elements * io::size_of(t.dtype) == static_cast<std::int64_t>(t.bytes.size()),
           "no partial element");
    expect(file.find(t.name) == &t, "names are unique");
    if (t.dtype == io::DType::kF64) {
      expect(t.as<double>().size() == static_cast<std::size_t>(elements), "copied whole");
    } else {
      expect_io_error([&] { t.as<double>(); });
    }
  }
}

void check_round_trip(const io::TensorFile& file) {
  const auto written = io::serialize_safetensors(file.tensors);
  const io::TensorFile again = io::parse_safetensors(written, "again");
  expect(again.tensors.size() == file.tensors.size(), "as many tensors");
  for (std::size_t i = 0; i < file.tensors.size(); ++i) {
    const io::Tensor& a = file.tensors[i];
    const io::Tensor& b = again.tensors[i];
    expect(a.name == b.name && a.dtype == b.dtype && a.shape == b.shape, "same header");
    expect(std::equal(a.bytes.begin(), a.bytes.end(), b.bytes.begin(), b.bytes.end()), "same data");
  }
}

void parse(std::span<const std::byte> bytes) {
  try {
    const io::TensorFile file = io::parse_safetensors(bytes, "fuzz");
    check_tensors(file);
    check_round_trip(file);
  } catch (const Error& error) {
    expect_readable(error);
  }
}

}  // namespace
}  // namespace uniep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  uniep::fuzz::parse(bytes);
  if (size < 8) return 0;
  // Mutations seldom keep the length prefix right, so also try the one that takes in all the JSON.
  std::vector<std::byte> fixed(bytes.begin(), bytes.end());
  const auto brace = std::find(fixed.rbegin(), fixed.rend(), std::byte{'}'});
  const auto header = static_cast<std::uint64_t>(fixed.rend() - brace);
  if (header <= 8) return 0;
  const std::uint64_t length = header - 8;
  std::memcpy(fixed.data(), &length, sizeof length);
  uniep::fuzz::parse(fixed);
  return 0;
}
