#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "uniep/error.h"

namespace uniep::fuzz {

/// Ends the run, so that libFuzzer keeps the input, unless `ok`.
inline void expect(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "fuzz: does not hold: %s\n", what);
  std::abort();
}

inline void expect_one_line(const std::string& sentence) {
  expect(!sentence.empty() && sentence.size() < 1000, "a sentence of sensible length");
  const auto printable = [](char c) { return c >= ' ' && c <= '~'; };
  expect(std::all_of(sentence.begin(), sentence.end(), printable), "one printable line");
}

inline void expect_readable(const Error& error) {
  expect(error.code() == ErrorCode::kIo, "kIo for whatever a file holds");
  expect_one_line(error.what());
}

template <class Run>
void expect_io_error(const Run& run) {
  try {
    run();
  } catch (const Error& error) {
    expect_readable(error);
    return;
  }
  expect(false, "an error");
}

}  // namespace uniep::fuzz
