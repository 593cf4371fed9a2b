#include "common/table.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <ostream>
#include <utility>

#include "base/check.h"
#include "common/text_columns.h"

namespace uniep::tool {
namespace {

/// A folded column is never narrower than this, whatever stands beside it.
constexpr std::size_t kLeastFolded = 16;

/// Puts words on lines.
class Folding {
 public:
  explicit Folding(std::size_t width) : width_(width) {}

  void add_word(std::string_view word) {
    if (fits(word, 1)) return append(" ", word);
    if (columns_of(word) <= width_ || word.find(',') == std::string_view::npos) {
      return begin_line(word);
    }
    // A long list begins on the line that there is.
    std::string_view between = lines_.back().empty() ? "" : " ";
    for (std::size_t begin = 0; begin < word.size();) {
      const std::size_t end = std::min(word.find(',', begin), word.size() - 1) + 1;
      const std::string_view item = word.substr(begin, end - begin);
      fits(item, between.size()) ? append(between, item) : begin_line(item);
      between = "";
      begin = end;
    }
  }
  std::vector<std::string> take_lines() { return std::move(lines_); }

 private:
  bool fits(std::string_view word, std::size_t between) const {
    const std::string& line = lines_.back();
    return (line.empty() ? 0 : columns_of(line) + between) + columns_of(word) <= width_;
  }
  void append(std::string_view between, std::string_view word) {
    if (!lines_.back().empty()) lines_.back() += between;
    lines_.back() += word;
  }
  void begin_line(std::string_view word) {
    lines_.back().empty() ? void(lines_.back() = word) : void(lines_.emplace_back(word));
  }

  std::size_t width_;
  std::vector<std::string> lines_{""};
};

std::string aligned(std::string line, const std::vector<std::string>& cells,
                    const std::vector<Table::Align>& align,
                    const std::vector<std::size_t>& widths) {
  for (std::size_t c = 0; c < cells.size(); ++c) {
    const std::size_t columns = columns_of(cells[c]);
    const std::string pad(widths[c] - std::min(columns, widths[c]), ' ');
    const bool left = align[c] == Table::Align::kLeft;
    line += (c == 0 ? " " : "  ") + (left ? cells[c] + pad : pad + cells[c]);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace

void Table::header(std::vector<std::string> cells) {
  ensure(cells.size() == align_.size(), "a table row has ", cells.size(), " cells");
  rows_.push_back({Kind::kHeader, std::move(cells)});
}

void Table::row(std::vector<std::string> cells) {
  ensure(cells.size() == align_.size(), "a table row has ", cells.size(), " cells");
  rows_.push_back({Kind::kRow, std::move(cells)});
}

void Table::remark(std::string text) { rows_.push_back({Kind::kRemark, {std::move(text)}}); }

/// The width of each column; the last one, if it can be folded, is as wide as is left for it at
/// most.
std::vector<std::size_t> Table::widths() const {
  std::vector<std::size_t> widths(align_.size(), 0);
  for (const Row& row : rows_) {
    if (row.kind == Kind::kRemark) continue;
    for (std::size_t c = 0; c < widths.size(); ++c) {
      widths[c] = std::max(widths[c], columns_of(row.cells[c]));
    }
  }
  if (widths.empty() || align_.back() == Align::kRight) return widths;
  std::size_t others = 2;
  for (std::size_t c = 0; c + 1 < widths.size(); ++c) others += widths[c] + 2;
  const std::size_t left = kTextColumns > others ? kTextColumns - others : 0;
  widths.back() = std::min(widths.back(), std::max(left, kLeastFolded));
  return widths;
}

std::ostream& operator<<(std::ostream& out, const Table& table) {
  const std::vector<std::size_t> widths = table.widths();
  for (const Table::Row& row : table.rows_) {
    if (row.kind == Table::Kind::kRemark) {
      out << paragraph("      ", "      ", row.cells.front());
      continue;
    }
    std::vector<std::string> cells = row.cells;
    const bool folds = !cells.empty() && columns_of(cells.back()) > widths.back();
    const std::vector<std::string> last =
        folds ? folded(cells.back(), widths.back()) : std::vector{cells.back()};
    for (const std::string& text : last) {
      cells.back() = text;
      out << aligned(row.kind == Table::Kind::kHeader ? "#" : " ", cells, table.align_, widths)
          << '\n';
      cells.assign(cells.size(), "");
    }
  }
  return out;
}

void Notes::add(std::string key, std::string text) {
  lines_.emplace_back(std::move(key), std::move(text));
}

std::ostream& operator<<(std::ostream& out, const Notes& notes) {
  std::size_t width = 0;
  for (const auto& [key, text] : notes.lines_) width = std::max(width, columns_of(key));
  const std::string indent(width, ' ');
  for (const auto& [key, text] : notes.lines_) {
    std::string begin = key + std::string(width - columns_of(key), ' ');
    for (const std::string& line : folded(text, kTextColumns - width - 4)) {
      out << "# " << std::exchange(begin, indent) << "  " << line << '\n';
    }
  }
  return out;
}

std::vector<std::string> folded(std::string_view text, std::size_t width) {
  Folding folding(width);
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    folding.add_word(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return folding.take_lines();
}

std::string paragraph(std::string_view first, std::string_view next, std::string_view text) {
  std::string lines;
  const std::size_t indent = std::max(columns_of(first), columns_of(next));
  for (const std::string& line : folded(text, kTextColumns - indent)) {
    lines += cat(lines.empty() ? first : next, line, '\n');
  }
  return lines;
}

std::string formatted(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string milliseconds(double seconds) {
  const double ms = 1e3 * seconds;
  const char* format = ms < 999.9995 ? "%.3f" : ms < 9999.995 ? "%.2f" : "%.1f";
  return formatted(format, ms);
}

std::string bytes_text(double bytes) {
  constexpr std::array kUnits = {"B", "kB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  while (bytes >= 999.995 && unit + 1 < kUnits.size()) {
    bytes /= 1000;
    ++unit;
  }
  return formatted(unit == 0 ? "%.0f " : "%.2f ", bytes) + kUnits[unit];
}

}  // namespace uniep::tool
