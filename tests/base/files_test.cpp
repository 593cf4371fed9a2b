// Files that are read whole, and replaced whole or not at all. What cannot be read or written is
// tested where safetensors and the cache of schedules use this.
#include "base/files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"
#include "base/output_file.h"
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
  EXPECT_NE(refusal(folder / "a" / "b").find("is a regular file; a folder is needed"),
            std::string::npos);
}

TEST(Files, WhetherOneCanBeWrittenChangesNothing) {
  const TemporaryFolder folder;
  require_writable(folder / "a");
  EXPECT_EQ(folder.num_files(), 0u);
  write(folder.file("a"), "text");
  require_writable(folder / "a");
  EXPECT_EQ(read_text(folder / "a"), "text");
  EXPECT_EQ(folder.num_files(), 1u);
  EXPECT_NE(refusal(folder / "no" / "b").find("there is no folder"), std::string::npos);
  EXPECT_NE(refusal(folder.path()).find("is a directory"), std::string::npos);
}

TEST(Files, LeftoversOfAProcessOfTheSameNumberAreNotInTheWay) {
  const TemporaryFolder folder;
  constexpr unsigned kLeft = 1000;  // more than this program has written
  for (unsigned i = 0; i < kLeft; ++i) {
    write_file(folder.file(cat(".uniep.tmp-", ::getpid(), "-", i)), "left");
  }
  for (const char* text : {"first", "second"}) {
    write(folder.file("a"), text);
    EXPECT_EQ(read_text(folder / "a"), text);
  }
  EXPECT_EQ(folder.num_files(), kLeft + 1);
}

TEST(Files, AFileSystemWithoutUnnamedFilesGetsANameThatGoes) {
  const TemporaryFolder folder;
  write_file(folder.file("a"), "earlier");
  {
    const TemporaryFile dropped(folder / "a", TemporaryFile::Naming::kNamed);
    EXPECT_EQ(folder.num_files(), 2u);
  }
  EXPECT_EQ(folder.num_files(), 1u);
  TemporaryFile kept(folder / "a", TemporaryFile::Naming::kNamed);
  ASSERT_EQ(::write(kept.descriptor(), "new", 3), 3);
  EXPECT_EQ(read_text(folder / "a"), "earlier");
  kept.publish();
  EXPECT_EQ(read_text(folder / "a"), "new");
  EXPECT_EQ(folder.num_files(), 1u);
}

TEST(Files, SignalsThatEndTheProcessRemoveTheTemporaryName) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const TemporaryFolder folder;
    // nohup, and shells for what they start in the background, leave some of them ignored.
    const auto given = ::signal(signal, SIG_DFL);
    const pid_t child = ::fork();
    if (child == 0) {
      const TemporaryFile file(folder / "a", TemporaryFile::Naming::kNamed);
      if (folder.num_files() != 1) ::_exit(1);
      ::raise(signal);
      ::_exit(2);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << "it ended as ever";
    EXPECT_EQ(folder.num_files(), 0u);
    struct sigaction now {};
    ::sigaction(signal, nullptr, &now);
    EXPECT_EQ(now.sa_handler, SIG_DFL);
    ::signal(signal, given);
  }
}

TEST(Files, ANameAsLongAsTheyGetCanBeReplaced) {
  const TemporaryFolder folder;
  const std::string name(255, 'x');
  write(folder.file(name), "first");
  write(folder.file(name), "second");
  EXPECT_EQ(read_text(folder / name), "second");
}

TEST(Files, TextsHaveALimit) {
  const TemporaryFolder folder;
  write(folder.file("a"), "text");
  ASSERT_EQ(::truncate(folder.file("a").c_str(), kMostTextBytes + 1), 0);
  EXPECT_NE(io::io_sentence([&] { read_text(folder / "a"); }).find(cat(kMostTextBytes)),
            std::string::npos);
}

/// What a user who owns none of it is told; run as that user where this one is allowed to be any.
TEST(Files, AFolderThatCannotBeEnteredIsNotCalledMissing) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "closed");
  ASSERT_EQ(::chmod(folder.path().c_str(), 0755), 0);
  ASSERT_EQ(::chmod(folder.file("closed").c_str(), 0), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::geteuid() == 0 && ::seteuid(65534) != 0) ::_exit(2);
    const std::string sentence = refusal(folder / "closed" / "a");
    const bool right = sentence.find("Permission denied") != std::string::npos &&
                       sentence.find("no folder") == std::string::npos;
    ::_exit(right ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(Files, OneFileHasOneIdentityWhateverLeadsThere) {
  const TemporaryFolder folder;
  write_file(folder.file("a"), "text");
  std::filesystem::create_hard_link(folder / "a", folder / "hard");
  std::filesystem::create_symlink("a", folder / "soft");
  std::filesystem::create_symlink("b", folder / "dangling");
  std::filesystem::create_symlink("dangling", folder / "further");
  ASSERT_TRUE(identity_of(folder / "a"));
  EXPECT_EQ(identity_of(folder / "hard"), identity_of(folder / "a"));
  EXPECT_EQ(identity_of(folder / "soft"), identity_of(folder / "a"));
  ASSERT_TRUE(identity_of(folder / "b"));
  EXPECT_EQ(identity_of(folder / "further"), identity_of(folder / "b"));
  EXPECT_NE(identity_of(folder / "a"), identity_of(folder / "b"));
  EXPECT_EQ(identity_of("/dev/null"), std::nullopt);
  write(folder.file("further"), "through both links");
  EXPECT_EQ(read_text(folder / "b"), "through both links");
}

TEST(Files, ALinkToItselfIsAnError) {
  const TemporaryFolder folder;
  std::filesystem::create_symlink("loop", folder / "loop");
  EXPECT_NE(refusal(folder / "loop").find("symbolic links"), std::string::npos);
}

}  // namespace
}  // namespace uniep::testing
