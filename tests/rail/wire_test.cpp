// Blocks that do not fit the memory that they are for write nothing.
#include "rail/wire.h"

#include <gtest/gtest.h>

#include "support/expect_error.h"

namespace uniep::rail {
namespace {

using uniep::testing::expect_error;

class WireTest : public ::testing::Test {
 protected:
  RailMemory memory() { return {.ranks = {first_, second_}}; }
  void expect_refused(const RailBlock& block, const std::string& sentence) {
    expect_error(ErrorCode::kIo, sentence,
                 [&] { deliver_block(pack_block(1, block), memory(), 1); });
    for (const std::byte b : second_) EXPECT_EQ(b, std::byte{0});
    for (const std::byte b : first_) EXPECT_EQ(b, std::byte{0});
  }

  alignas(4) std::byte first_[16] = {};
  alignas(4) std::byte second_[16] = {};
  const std::byte bytes_[4] = {std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}};
};

TEST_F(WireTest, ABlockIsStoredAndSignalled) {
  const Bytes body = pack_block(9, {.segments = {{8, bytes_}, {1, std::span(bytes_).first(2)}},
                                    .signals = {{4, 0, 3}, {12, 1, 1}}});
  EXPECT_EQ(memory_of(body), 9u);
  deliver_block(body, memory(), 1);
  EXPECT_EQ(second_[8], std::byte{1});
  EXPECT_EQ(second_[11], std::byte{4});
  EXPECT_EQ(second_[2], std::byte{2});
  EXPECT_EQ(first_[4], std::byte{3});
  EXPECT_EQ(second_[12], std::byte{1});
}

TEST_F(WireTest, PlacesBeyondTheMemoryAreRefused) {
  expect_refused({.segments = {{0, bytes_}, {13, bytes_}}},
                 "a block between hosts is for bytes 13 to 17 of a memory of 16");
  expect_refused({.segments = {{-1, bytes_}}},
                 "a block between hosts is for bytes -1 to 3 of a memory of 16");
  expect_refused({.segments = {{0, bytes_}}, .signals = {{16, 0, 1}}},
                 "a block between hosts is for bytes 16 to 20 of a memory of 16");
  expect_refused({.segments = {{0, bytes_}}, .signals = {{0, 2, 1}}},
                 "a block between hosts is for local rank 2");
}

TEST_F(WireTest, EveryCutIsRefused) {
  const Bytes body = pack_block(9, {.segments = {{8, bytes_}}, .signals = {{4, 0, 3}}});
  for (std::size_t n = 0; n < body.size(); ++n) {
    expect_error(ErrorCode::kIo, "a block between hosts is cut short",
                 [&] { deliver_block(std::span(body).first(n), memory(), 1); });
  }
  EXPECT_EQ(memory_of(std::span(body).first(4)), std::nullopt);
}

}  // namespace
}  // namespace uniep::rail
