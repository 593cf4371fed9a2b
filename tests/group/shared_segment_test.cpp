// Memory that processes share, and what does not pass for it.
#include "group/shared_segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/check.h"
#include "support/cases.h"
#include "support/expect_error.h"
#include "support/random_case.h"

namespace uniep::testing {
namespace {

const SegmentIdentity kOurs{.group = 77, .rank = 1, .size = 4, .number = 3, .bytes = 10000};

std::string refusal(const std::string& why) {
  return "the shared memory of rank 1 " + why + "; what that rank made for this group is accepted";
}

TEST(SharedSegment, IsZeroAndTheSameForWhoOpensIt) {
  const SharedSegment made(kOurs);
  for (std::int64_t i = 0; i < kOurs.bytes; ++i) ASSERT_EQ(made.content()[i], std::byte{0});
  SharedSegment opened(getpid(), made.descriptor(), kOurs);
  EXPECT_NE(opened.content(), made.content());
  made.content()[9999] = std::byte{5};
  EXPECT_EQ(opened.content()[9999], std::byte{5});
  opened.content()[0] = std::byte{6};
  EXPECT_EQ(made.content()[0], std::byte{6});
}

TEST(SharedSegment, LastsAsLongAsSomebodyMapsItAndCannotBeCutShort) {
  auto made = std::make_unique<SharedSegment>(kOurs);
  EXPECT_NE(ftruncate(made->descriptor(), 0), 0);
  EXPECT_NE(ftruncate(made->descriptor(), 1 << 20), 0);
  const SharedSegment opened(getpid(), made->descriptor(), kOurs);
  made->content()[1] = std::byte{7};
  made.reset();
  EXPECT_EQ(opened.content()[1], std::byte{7});
}

TEST(SharedSegment, IsNotOpenedOnceItIsClosed) {
  SharedSegment made(kOurs);
  const int descriptor = made.descriptor();
  made.close();
  expect_error(ErrorCode::kUnsupported,
               cat("cannot open the shared memory of rank 1 (/proc/", getpid(), "/fd/", descriptor,
                   ": No such file or directory); processes of one user that see each other in "
                   "/proc are accepted"),
               [&] { SharedSegment(getpid(), descriptor, kOurs); });
}

TEST(SharedSegment, OfAnotherGroupRankSizeNumberOrLengthIsRefused) {
  const SharedSegment made(kOurs);
  const auto expect_refused = [&](const std::function<void(SegmentIdentity&)>& change,
                                  const std::string& sentence) {
    SegmentIdentity wanted = kOurs;
    change(wanted);
    expect_error(ErrorCode::kIo, sentence,
                 [&] { SharedSegment(getpid(), made.descriptor(), wanted); });
  };
  expect_refused([](auto& w) { w.group = 78; }, refusal("is of another group"));
  expect_refused([](auto& w) { w.rank = 2; },
                 "the shared memory of rank 2 says that rank 1 made it; what that rank made for "
                 "this group is accepted");
  expect_refused([](auto& w) { w.size = 8; }, refusal("is of a group of 4 ranks, not 8"));
  expect_refused([](auto& w) { w.number = 4; }, refusal("is segment 3, not 4"));
  expect_refused([](auto& w) { w.bytes = 10001; },
                 refusal("says that it has 10000 bytes, not 10001"));
}

/// A file in memory with these bytes.
Descriptor file_of(const std::string& bytes, int seals) {
  Descriptor file(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(write(file.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  EXPECT_EQ(fcntl(file.get(), F_ADD_SEALS, seals), 0);
  return file;
}

constexpr int kAllSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string good_bytes() {
  const SharedSegment made(kOurs);
  std::string bytes(SharedSegment::kHeaderBytes + static_cast<std::size_t>(kOurs.bytes), '\0');
  EXPECT_EQ(pread(made.descriptor(), bytes.data(), bytes.size(), 0),
            static_cast<ssize_t>(bytes.size()));
  return bytes;
}

TEST(SharedSegment, WhatIsWholeAndSealedIsAccepted) {
  check_segment(file_of(good_bytes(), kAllSeals).get(), kOurs);
}

TEST(SharedSegment, WhatCouldBeCutShortIsRefused) {
  for (const int seals : {0, F_SEAL_GROW | F_SEAL_SEAL, F_SEAL_SHRINK | F_SEAL_GROW}) {
    expect_error(ErrorCode::kIo, refusal("could be cut short"),
                 [&] { check_segment(file_of(good_bytes(), seals).get(), kOurs); });
  }
}

TEST(SharedSegment, DamagedOnesAreRefused) {
  const std::string good = good_bytes();
  const auto expect_refused = [&](const std::string& bytes, const std::string& why) {
    expect_error(ErrorCode::kIo, refusal(why),
                 [&] { check_segment(file_of(bytes, kAllSeals).get(), kOurs); });
  };
  expect_refused("", "has 0 bytes, too few for a header");
  expect_refused(good.substr(0, 20), "has 20 bytes, too few for a header");
  expect_refused(good.substr(0, good.size() - 1), "has 14095 bytes with its header, not 14096");
  expect_refused(good + '\0', "has 14097 bytes with its header, not 14096");
  expect_refused(std::string(good.size(), '\0'), "does not begin as a segment of uniep does");
  std::string newer = good;
  newer[8] = 9;
  expect_refused(newer, "has version 9 of the header, and this process reads version 1");
}

/// Every bit of the header counts.
TEST(SharedSegment, OneWithAnyBitOfItsHeaderTurnedIsRefused) {
  const std::string good = good_bytes();
  std::size_t header = SharedSegment::kHeaderBytes;
  while (good[header - 1] == '\0') --header;  // behind are zeros that nobody reads
  int refused = 0;
  for (std::size_t bit = 0; bit < 8 * header; ++bit) {
    std::string damaged = good;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    try {
      check_segment(file_of(damaged, kAllSeals).get(), kOurs);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kIo);
      ++refused;
    }
  }
  EXPECT_EQ(refused, 8 * static_cast<int>(header));
}

TEST(SharedSegment, WhatIsNoFileIsNeitherOpenedNorAccepted) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  expect_error(ErrorCode::kIo, refusal("is not a file"),
               [&] { SharedSegment(getpid(), ends[0], kOurs); });
  expect_error(ErrorCode::kIo, refusal("is not a file"), [&] { check_segment(ends[0], kOurs); });
  close(ends[0]);
  close(ends[1]);
}

TEST(SharedSegment, MoreThanThereIsIsRefused) {
  SegmentIdentity vast = kOurs;
  vast.bytes = INT64_MAX / 2;
  try {
    const SharedSegment made(vast);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kCapacity) << e.what();
    EXPECT_NE(std::string(e.what()).find("bytes of shared memory"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace uniep::testing
