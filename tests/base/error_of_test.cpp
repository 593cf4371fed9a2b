#include "base/error_of.h"

#include <gtest/gtest.h>

#include <string>

namespace uniep {
namespace {

TEST(ErrorOf, KeepsAnErrorAndSaysOtherExceptionsInWords) {
  const Error own = error_of(Error(ErrorCode::kIo, "no file"));
  EXPECT_EQ(own.code(), ErrorCode::kIo);
  EXPECT_STREQ(own.what(), "no file");
  const Error memory = error_of(std::bad_alloc());
  EXPECT_EQ(memory.code(), ErrorCode::kCapacity);
  EXPECT_NE(std::string(memory.what()).find("out of memory"), std::string::npos);
  const Error other = error_of(std::runtime_error("of a user"));
  EXPECT_EQ(other.code(), ErrorCode::kInternal);
  EXPECT_STREQ(other.what(), "of a user");
}

}  // namespace
}  // namespace uniep
