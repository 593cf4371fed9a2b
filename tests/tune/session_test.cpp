// A search goes on from its own session, and from nothing else that may stand in its place.
#include "tune/search/session.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "support/temporary_folder.h"

namespace uniep::tune {
namespace {

using uniep::testing::file_text;
using uniep::testing::TemporaryFolder;
using uniep::testing::write_file;

constexpr const char* kSearch = "tiny,tokens=5, skew 0";

Session session() {
  Session s{.key = {}, .identity = kSearch, .date = "2026-11-23T00:00:00Z", .candidates = {}};
  s.candidates.push_back({parse_schedule("single"), 0, {1.5, 1.25}, false});
  s.candidates.push_back({parse_schedule("two-kernel,tile_m=32"), 2.5, {}, true});
  return s;
}

std::optional<std::string> accept_all(const Schedule&) { return std::nullopt; }

TEST(Session, IsFoundAgain) {
  const TemporaryFolder folder;
  save_session(folder.file("s"), session());
  std::vector<std::string> problems;
  const auto loaded = load_session(folder.file("s"), {}, kSearch, accept_all, problems);
  EXPECT_TRUE(problems.empty());
  ASSERT_TRUE(loaded);
  ASSERT_EQ(loaded->candidates.size(), 2u);
  EXPECT_EQ(loaded->candidates[0].seconds, (std::vector<double>{1.5, 1.25}));
  EXPECT_EQ(loaded->candidates[1].schedule, parse_schedule("two-kernel,tile_m=32"));
  EXPECT_TRUE(loaded->candidates[1].rejected);
}

TEST(Session, OfAnotherSearchIsNone) {
  const TemporaryFolder folder;
  save_session(folder.file("s"), session());
  std::vector<std::string> problems;
  EXPECT_FALSE(load_session(folder.file("s"), {}, "another", accept_all, problems));
  TuneKey ranks, driver, library;
  ranks.ranks = 3;
  driver.driver = "x";
  library.library = "x";
  for (const TuneKey& other : {ranks, driver, library}) {
    EXPECT_FALSE(load_session(folder.file("s"), other, kSearch, accept_all, problems));
    EXPECT_NE(session_path("cache", other, kSearch), session_path("cache", {}, kSearch));
  }
  EXPECT_FALSE(load_session(folder.file("none"), {}, kSearch, accept_all, problems));
  EXPECT_TRUE(problems.empty());
}

TEST(Session, WhatCannotBeUsedIsReportedAndIgnored) {
  const TemporaryFolder folder;
  const std::string path = folder.file("s");
  save_session(path, session());
  const std::string text = file_text(path);
  const auto all = [&](const char* candidates) {
    const std::size_t at = text.find("\"candidates\"");
    return text.substr(0, at) + "\"candidates\": " + candidates + "}";
  };
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string other = text;
    return other.replace(other.find(from), from.size(), to);
  };
  for (const std::string& damaged :
       {all("[]"), all("{}"), all("{\"a\": 1}"), all("null"), changed("1.25", "-1.25"),
        changed("1.25", "0"), changed("1.25", "null"), changed("1.25", "1e999"),
        changed("2.5", "-2.5"), changed("tile_m=32", "tile_m=33")}) {
    write_file(path, damaged);
    std::vector<std::string> problems;
    EXPECT_FALSE(load_session(path, {}, kSearch, accept_all, problems)) << damaged;
    ASSERT_EQ(problems.size(), 1u) << damaged;
    EXPECT_NE(problems[0].find(path + " is ignored"), std::string::npos);
  }
}

TEST(Session, IsDescribedWhateverSearchItIsOf) {
  const TemporaryFolder folder;
  const std::string cache = folder.file("tuned.json");
  const std::string path = session_path(cache, {}, kSearch);
  save_session(path, session());
  write_file(cache + ".session-f00", "damaged");
  write_file(folder.file("another.json.session-f00"), "of another cache");
  EXPECT_EQ(session_files(cache), (std::vector<std::string>{
                                      std::min(path, cache + ".session-f00"),
                                      std::max(path, cache + ".session-f00"),
                                  }));
  const StoredSession s = describe_session(path);
  EXPECT_EQ(s.date, "2026-11-23T00:00:00Z");
  EXPECT_NE(s.identity.find(kSearch), std::string::npos);
  EXPECT_EQ(s.candidates, 2u);
  EXPECT_EQ(s.measured, 2u);
  EXPECT_EQ(s.problem, "");
  EXPECT_NE(describe_session(cache + ".session-f00").problem, "");
  EXPECT_NE(describe_session(folder.file("none")).problem, "");
  EXPECT_TRUE(session_files("/no/such/folder/tuned.json").empty());
}

TEST(Session, WithAScheduleThatCannotRunIsReportedAndIgnored) {
  const TemporaryFolder folder;
  save_session(folder.file("s"), session());
  std::vector<std::string> problems;
  const auto refusal = [](const Schedule& s) -> std::optional<std::string> {
    if (s.tile_m == 32) return "tiles are too low";
    return std::nullopt;
  };
  EXPECT_FALSE(load_session(folder.file("s"), {}, kSearch, refusal, problems));
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find("tiles are too low"), std::string::npos);
}

TEST(Session, InAPlaceThatIsAFolderIsReportedAndIgnored) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.file("s"));
  std::vector<std::string> problems;
  EXPECT_FALSE(load_session(folder.file("s"), {}, kSearch, accept_all, problems));
  EXPECT_EQ(problems.size(), 1u);
}

}  // namespace
}  // namespace uniep::tune
