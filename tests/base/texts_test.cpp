// What sentences show of a user's texts, and which name a mistyped one is taken for.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/nearest.h"
#include "base/quotes.h"

namespace uniep::testing {
namespace {

TEST(Quotes, AShortTextIsShownAsItIs) {
  EXPECT_EQ(in_quotes(""), "''");
  EXPECT_EQ(in_quotes("tile_m=64"), "'tile_m=64'");
  EXPECT_EQ(shortened(std::string(kMostQuoted, 'x')), std::string(kMostQuoted, 'x'));
}

TEST(Quotes, OfALongTextBothEndsAreShown) {
  const std::string text = "begin" + std::string(5000, '-') + "end";
  const std::string shown = shortened(text);
  EXPECT_EQ(shown.size(), kMostQuoted);
  EXPECT_TRUE(shown.starts_with("begin-"));
  EXPECT_TRUE(shown.ends_with("-end"));
  EXPECT_NE(shown.find("..."), std::string::npos);
}

TEST(Quotes, WhatIsNoUtf8IsReplaced) {
  EXPECT_EQ(in_quotes("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"),
            "'\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80'");
  EXPECT_EQ(in_quotes("--\xff"), "'--?'");
  EXPECT_EQ(in_quotes("\xc3("), "'?('");
  EXPECT_EQ(in_quotes("\xe2\x82"), "'\?\?'");
  EXPECT_EQ(in_quotes("\xc0\xaf\x80"), "'\?\?\?'");
  EXPECT_EQ(in_quotes("\xed\xb3\xbf"), "'\?\?\?'") << "half of a pair of UTF-16";
}

TEST(Quotes, NothingBreaksTheLine) { EXPECT_EQ(in_quotes("a\nb\tc\x7f"), "'a?b?c?'"); }

TEST(Quotes, ALetterOfSeveralBytesIsNotCut) {
  for (std::size_t before = 0; before < 4; ++before) {
    std::string text(before, 'a');
    for (int i = 0; i < 60; ++i) text += "\xe2\x82\xac";  // a euro sign
    const std::string shown = shortened(text);
    EXPECT_LE(shown.size(), kMostQuoted);
    std::size_t letters = 0;
    for (std::size_t i = before; i < shown.size(); letters += 3) {
      if (shown[i] == '.') {
        i += 3;
        continue;
      }
      ASSERT_EQ(shown.substr(i, 3), "\xe2\x82\xac") << shown;
      i += 3;
    }
    EXPECT_GE(letters, kMostQuoted - 12);
  }
}

const std::vector<std::string> kNames = {"schedule", "shape", "seed", "skew", "ranks", "repeat"};

TEST(Nearest, FindsWhatIsAFewLettersAway) {
  EXPECT_EQ(nearest("schedul", kNames), "schedule");
  EXPECT_EQ(nearest("scheduel", kNames), "schedule");
  EXPECT_EQ(nearest("shpae", kNames), "shape");
  EXPECT_EQ(nearest("seeed", kNames), "seed");
  EXPECT_EQ(nearest("rank", kNames), "ranks");
  EXPECT_EQ(nearest("sked", std::vector<std::string>{"skew", "seed"}), "skew") << "the first";
}

TEST(Nearest, LettersInAnotherOrderAreNear) {
  EXPECT_EQ(nearest("tyni", std::vector<std::string>{"small", "tiny"}), "tiny");
  EXPECT_EQ(nearest("on", std::vector<std::string>{"no"}), "no") << "swapped";
  EXPECT_EQ(nearest("abc", std::vector<std::string>{"cab"}), "") << "too short to tell";
}

TEST(Nearest, AWordThatBeginsANameIsNear) {
  EXPECT_EQ(nearest("sched", kNames), "schedule");
  EXPECT_EQ(nearest("re", kNames), "repeat");
}

TEST(Nearest, DoesNotGuess) {
  for (const char* word : {"", "loudly", "x", "tokens", "schwarz"}) {
    EXPECT_EQ(nearest(word, kNames), "") << word;
  }
  EXPECT_EQ(nearest(std::string(1 << 20, 's'), kNames), "");
  EXPECT_EQ(nearest("seed", {}), "");
}

}  // namespace
}  // namespace uniep::testing
