#include "common/table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "base/quantile.h"
#include "common/text_columns.h"

namespace uniep::tool {
namespace {

using enum Table::Align;

template <class T>
std::string printed(const T& thing) {
  std::ostringstream out;
  out << thing;
  return out.str();
}

TEST(Table, AlignsColumnsAndMarksHeadersAsComments) {
  Table table({kLeft, kRight});
  table.header({"stage", "ms"});
  table.row({"fc1", "12.5"});
  table.row({"reduce", "3"});
  EXPECT_EQ(printed(table),
            "# stage     ms\n"
            "  fc1     12.5\n"
            "  reduce     3\n");
}

TEST(Table, LeavesNoBlanksAtTheEndOfALine) {
  Table table({kLeft, kLeft});
  table.row({"a", ""});
  table.row({"b", "long"});
  EXPECT_EQ(printed(table), "  a\n  b  long\n");
}

/// The longest line, in columns.
std::size_t width_of(const std::string& text) {
  std::istringstream lines(text);
  std::size_t widest = 0;
  for (std::string line; std::getline(lines, line);) widest = std::max(widest, columns_of(line));
  return widest;
}

std::string repeated(const std::string& word, int times) {
  std::string text;
  for (int i = 0; i < times; ++i) text += word;
  return text;
}

TEST(Table, FoldsTheLastCellBelowItself) {
  Table table({kLeft, kLeft});
  table.header({"name", "meaning"});
  table.row({"key", "begin " + repeated("word ", 30)});
  table.row({"other", repeated("axis=value,", 30)});
  const std::string text = printed(table);
  EXPECT_LE(width_of(text), kTextColumns);
  EXPECT_GT(width_of(text), kTextColumns - 12) << "words, and items of a list, fill lines";
  EXPECT_NE(text.find("\n         word word"), std::string::npos) << text;
  EXPECT_NE(text.find("\n         axis=value,axis"), std::string::npos) << text;
}

TEST(Table, DoesNotFoldColumnsOfNumbersNorBelowAFewLetters) {
  Table table({kLeft, kRight});
  table.row({repeated("x", 90), repeated("1", 20)});
  EXPECT_EQ(printed(table), "  " + repeated("x", 90) + "  " + repeated("1", 20) + "\n");
  Table narrow({kLeft, kLeft});
  narrow.row({repeated("x", 99), "some words that would be cut to one a line"});
  EXPECT_EQ(std::ranges::count(printed(narrow), '\n'), 3);
}

TEST(Table, AlignsWideCharacters) {
  Table table({kLeft, kLeft});
  table.row({"\xe5\xb1\xa4", "a"});  // two columns wide
  table.row({"ab", "a"});
  EXPECT_EQ(printed(table), "  \xe5\xb1\xa4  a\n  ab  a\n");
}

TEST(Notes, PadsKeys) {
  Notes notes;
  notes.add("a", "1");
  notes.add("long", "2");
  EXPECT_EQ(printed(notes), "# a     1\n# long  2\n");
}

TEST(Notes, FoldsLongTextsBehindTheirKeys) {
  Notes notes;
  notes.add("schedule 0",
            repeated("axis=value,", 30) + "last=1 (auto: forward default, backward default)");
  notes.add("a", repeated("word ", 40));
  const std::string text = printed(notes);
  EXPECT_LE(width_of(text), kTextColumns);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_TRUE(line.starts_with("# ")) << line;
  EXPECT_NE(text.find(",\n#             axis=value"), std::string::npos) << text;
}

TEST(Comment, IsIndentedFromItsSecondLineOn) {
  EXPECT_EQ(comment("short"), "# short\n");
  const std::string text = comment(repeated("word ", 40));
  EXPECT_LE(width_of(text), kTextColumns);
  EXPECT_NE(text.find("\n#   word"), std::string::npos);
}

TEST(Folded, BreaksListsBehindCommas) {
  EXPECT_EQ(folded("a=1,b=2,c=3", 8), (std::vector<std::string>{"a=1,b=2,", "c=3"}));
  EXPECT_EQ(folded("x a=1,b=2,c=3", 8), (std::vector<std::string>{"x a=1,", "b=2,c=3"}));
  EXPECT_EQ(folded("a,b c", 8), (std::vector<std::string>{"a,b c"}));
  EXPECT_EQ(folded("abcdefghijk,b", 4), (std::vector<std::string>{"abcdefghijk,", "b"}));
}

TEST(Folded, KeepsLongWordsAndEmptyText) {
  EXPECT_EQ(folded("", 5), (std::vector<std::string>{""}));
  EXPECT_EQ(folded("abcdefgh ij k", 4), (std::vector<std::string>{"abcdefgh", "ij k"}));
}

TEST(Numbers, Format) {
  EXPECT_EQ(milliseconds(0.0123456), "12.346");
  EXPECT_EQ(milliseconds(0.9999994), "999.999");
  EXPECT_EQ(milliseconds(0.9999996), "1000.00");
  EXPECT_EQ(milliseconds(12.3456789), "12345.7");
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(999), "999 B");
  EXPECT_EQ(bytes_text(1500), "1.50 kB");
  EXPECT_EQ(bytes_text(3.2e9), "3.20 GB");
}

TEST(Quantile, InterpolatesBetweenNeighbours) {
  EXPECT_DOUBLE_EQ(median({3, 1, 2}), 2);
  EXPECT_DOUBLE_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_DOUBLE_EQ(quantile({0, 10}, 0.1), 1);
  EXPECT_DOUBLE_EQ(quantile({5}, 0.9), 5);
  EXPECT_DOUBLE_EQ(quantile({}, 0.9), 0);
}

}  // namespace
}  // namespace uniep::tool
