#pragma once

#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace uniep::tool {

/// Rows of cells printed with aligned columns. Header rows are printed as comments ("# "), so that
/// what is not a comment is data.
class Table {
 public:
  enum class Align { kLeft, kRight };

  /// `align` has an entry a column.
  explicit Table(std::vector<Align> align) : align_(std::move(align)) {}

  void header(std::vector<std::string> cells);
  void row(std::vector<std::string> cells);
  /// A row whose last cell goes on below itself where it is wider than `width`.
  void folded_row(std::vector<std::string> cells, std::size_t width);

  friend std::ostream& operator<<(std::ostream& out, const Table& table);

 private:
  struct Row {
    bool is_header;
    std::vector<std::string> cells;
  };
  std::vector<Align> align_;
  std::vector<Row> rows_;
};

/// Lines of the form "# key       text", keys padded to one width.
class Notes {
 public:
  void add(std::string key, std::string text);
  friend std::ostream& operator<<(std::ostream& out, const Notes& notes);

 private:
  std::vector<std::pair<std::string, std::string>> lines_;
};

/// The text in lines of at most `width` letters, broken at spaces (a longer word stays whole).
std::vector<std::string> folded(std::string_view text, std::size_t width);

/// "12.345": milliseconds with microseconds behind the point.
std::string milliseconds(double seconds);

/// "1.50 MB", in powers of 1000.
std::string bytes_text(double bytes);

/// printf for one number.
std::string formatted(const char* format, double value);

}  // namespace uniep::tool
