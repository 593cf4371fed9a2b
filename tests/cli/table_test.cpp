#include "table.h"

#include <gtest/gtest.h>

#include <sstream>

#include "base/quantile.h"

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

TEST(Table, FoldsTheLastCellBelowItself) {
  Table table({kLeft, kLeft});
  table.folded_row({"key", "one two three"}, 7);
  EXPECT_EQ(printed(table), "  key  one two\n       three\n");
}

TEST(Notes, PadsKeys) {
  Notes notes;
  notes.add("a", "1");
  notes.add("long", "2");
  EXPECT_EQ(printed(notes), "# a     1\n# long  2\n");
}

TEST(Folded, KeepsLongWordsAndEmptyText) {
  EXPECT_EQ(folded("", 5), (std::vector<std::string>{""}));
  EXPECT_EQ(folded("abcdefgh ij k", 4), (std::vector<std::string>{"abcdefgh", "ij k"}));
}

TEST(Numbers, Format) {
  EXPECT_EQ(milliseconds(0.0123456), "12.346");
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
