#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "support/temporary_folder.h"
#include "uniep/error.h"

namespace uniep::io {

/// What() of the Error that `run` throws; fails the test for another kind of error or none.
template <class Run>
std::string sentence_of(ErrorCode code, const Run& run) {
  try {
    run();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << "one line";
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

template <class Run>
std::string io_sentence(const Run& run) {
  return sentence_of(ErrorCode::kIo, run);
}

using testing::TemporaryFolder;

/// A safetensors file of this header, not padded, and so many zero bytes of data.
inline std::vector<std::byte> raw_file(const std::string& header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  std::vector<std::byte> file(sizeof length + header.size() + data_bytes);
  std::memcpy(file.data(), &length, sizeof length);
  std::memcpy(file.data() + sizeof length, header.data(), header.size());
  return file;
}

}  // namespace uniep::io
