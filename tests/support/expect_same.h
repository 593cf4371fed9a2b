#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/layer_data.h"
#include "reference/compare.h"

namespace uniep::testing {

template <class T>
void expect_same_bits(const std::vector<T>& got, const std::vector<T>& want, const char* tensor,
                      const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << tensor << ": " << what;
  const auto difference = reference::first_difference(got, want);
  EXPECT_EQ(difference.count, 0) << tensor << " differs first at element " << difference.index
                                 << " of " << got.size() << ": " << what;
}

/// Every tensor of both results, bit for bit.
inline void expect_same_bits(const LayerResult& got, const LayerResult& want,
                             const std::string& what) {
  expect_same_bits(got.out, want.out, "out", what);
  expect_same_bits(got.dx, want.dx, "dx", what);
  expect_same_bits(got.dprobs, want.dprobs, "dprobs", what);
  expect_same_bits(got.dw1, want.dw1, "dw1", what);
  expect_same_bits(got.dw2, want.dw2, "dw2", what);
  expect_same_bits(got.main_dw1, want.main_dw1, "main_dw1", what);
  expect_same_bits(got.main_dw2, want.main_dw2, "main_dw2", what);
  expect_same_bits(got.db1, want.db1, "db1", what);
  expect_same_bits(got.db2, want.db2, "db2", what);
  expect_same_bits(got.main_db1, want.main_db1, "main_db1", what);
  expect_same_bits(got.main_db2, want.main_db2, "main_db2", what);
  expect_same_bits(got.dshared_probs, want.dshared_probs, "dshared_probs", what);
  expect_same_bits(got.dshared_w1, want.dshared_w1, "dshared_w1", what);
  expect_same_bits(got.dshared_w2, want.dshared_w2, "dshared_w2", what);
  expect_same_bits(got.main_dshared_w1, want.main_dshared_w1, "main_dshared_w1", what);
  expect_same_bits(got.main_dshared_w2, want.main_dshared_w2, "main_dshared_w2", what);
}

}  // namespace uniep::testing
