#pragma once

#include <cstddef>
#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"

namespace uniep::tool {

/// What is printed takes at most so many columns, as far as words let it.
inline constexpr std::size_t kTextColumns = 100;

/// Rows of cells printed with aligned columns. Header rows are printed as comments ("# "), so that
/// what is not a comment is data. A last column that is aligned left goes on below itself where a
/// line would be too long.
class Table {
 public:
  enum class Align { kLeft, kRight };

  /// `align` has an entry a column.
  explicit Table(std::vector<Align> align) : align_(std::move(align)) {}

  void header(std::vector<std::string> cells);
  void row(std::vector<std::string> cells);
  /// A text below the last row, indented, across all columns.
  void remark(std::string text);

  friend std::ostream& operator<<(std::ostream& out, const Table& table);

 private:
  enum class Kind { kHeader, kRow, kRemark };
  struct Row {
    Kind kind;
    std::vector<std::string> cells;  // of a remark the text alone
  };
  std::vector<std::size_t> widths() const;

  std::vector<Align> align_;
  std::vector<Row> rows_;
};

/// Lines of the form "# key       text", keys padded to one width, long texts folded below
/// themselves.
class Notes {
 public:
  void add(std::string key, std::string text);
  friend std::ostream& operator<<(std::ostream& out, const Notes& notes);

 private:
  std::vector<std::pair<std::string, std::string>> lines_;
};

/// The text in lines of at most `width` columns, broken at spaces, and a longer word behind its
/// commas. What has neither stays whole.
std::vector<std::string> folded(std::string_view text, std::size_t width);

/// A text as lines, the first behind `first`, others behind `next`.
std::string paragraph(std::string_view first, std::string_view next, std::string_view text);

/// A sentence as comment lines: "# ...", continued ones indented.
inline std::string comment(std::string_view text) { return paragraph("# ", "#   ", text); }

/// "12.345": milliseconds with microseconds behind the point, fewer digits of large ones.
std::string milliseconds(double seconds);

/// "1.50 MB", in powers of 1000.
std::string bytes_text(double bytes);

/// "1 pass", "2 passes".
template <class Integer>
std::string counted(Integer n, std::string_view one, std::string_view many) {
  return cat(n, ' ', n == 1 ? one : many);
}

/// printf for one number.
std::string formatted(const char* format, double value);

}  // namespace uniep::tool
