// Files that are read whole, and replaced whole or not at all. What cannot be read or written is
// tested where safetensors and the cache of schedules use this.
#include "base/files.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/check.h"
#include "io/io_test_util.h"
#include "support/temporary_folder.h"

namespace uniep::testing {
namespace {

void write(const std::string& path, std::string_view text) {
  write_atomically(path, {std::as_bytes(std::span(text))});
}

/// Why a file cannot be written there.
std::string refusal(const std::filesystem::path& path) {
  return io::io_sentence([&] { require_writable(path); });
}

TEST(Files, WhatWasWrittenIsRead) {
  const TemporaryFolder folder;
  EXPECT_EQ(read_text(folder / "none"), std::nullopt);
  for (const char* text : {"", "first", "second and longer"}) {
    write(folder.file("a"), text);
    EXPECT_EQ(read_text(folder / "a"), text);
  }
  EXPECT_EQ(folder.num_files(), 1u);
}

TEST(Files, AFileInPlaceOfAFolderIsNoFile) {
  const TemporaryFolder folder;
  write(folder.file("a"), "text");
  EXPECT_EQ(read_text(folder / "a" / "b"), std::nullopt);
  EXPECT_NE(refusal(folder / "a" / "b").find("Not a directory"), std::string::npos);
}

TEST(Files, WhetherOneCanBeWrittenChangesNothing) {
  const TemporaryFolder folder;
  require_writable(folder / "a");
  EXPECT_EQ(folder.num_files(), 0u);
  write(folder.file("a"), "text");
  require_writable(folder / "a");
  EXPECT_EQ(read_text(folder / "a"), "text");
  EXPECT_EQ(folder.num_files(), 1u);
  EXPECT_NE(refusal(folder / "no" / "b").find("No such file or directory"), std::string::npos);
  EXPECT_NE(refusal(folder.path()).find("is a directory"), std::string::npos);
}

TEST(Files, LeftoversOfAProcessOfTheSameNumberAreNotInTheWay) {
  const TemporaryFolder folder;
  constexpr unsigned kLeft = 1000;  // more than this program has written
  for (unsigned i = 0; i < kLeft; ++i) {
    write_file(folder.file(cat("a.tmp-", ::getpid(), "-", i)), "left");
  }
  write(folder.file("a"), "text");
  EXPECT_EQ(read_text(folder / "a"), "text");
  EXPECT_EQ(folder.num_files(), kLeft + 1);
}

}  // namespace
}  // namespace uniep::testing
