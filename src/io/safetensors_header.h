#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"

namespace uniep::io {

/// One tensor as the JSON header describes it; offsets count from the first byte after the header.
struct HeaderEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// A name or token out of a file as error texts show it: quoted, on one line, not too long.
std::string quote_name(std::string_view text);

/// Bytes of a tensor, or -1 where that overflows 63 bits.
std::int64_t byte_size(DType dtype, const std::vector<std::int64_t>& shape);

/// Reads the JSON and checks each entry by itself and all of them together: they must cover the
/// `data_size` bytes after the header without gap or overlap. Error(kIo) otherwise.
std::vector<HeaderEntry> parse_header(std::string_view json, std::uint64_t data_size,
                                      const std::string& file);

}  // namespace uniep::io
