#include "table.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <ostream>
#include <utility>

#include "base/check.h"

namespace uniep::tool {
namespace {

/// Letters, not bytes, as far as UTF-8 goes.
std::size_t width_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

void Table::header(std::vector<std::string> cells) {
  ensure(cells.size() == align_.size(), "a table row has ", cells.size(), " cells");
  rows_.push_back({true, std::move(cells)});
}

void Table::row(std::vector<std::string> cells) {
  ensure(cells.size() == align_.size(), "a table row has ", cells.size(), " cells");
  rows_.push_back({false, std::move(cells)});
}

void Table::folded_row(std::vector<std::string> cells, std::size_t width) {
  for (std::string& line : folded(std::exchange(cells.back(), ""), width)) {
    cells.back() = std::move(line);
    row(std::exchange(cells, std::vector<std::string>(cells.size())));
  }
}

std::ostream& operator<<(std::ostream& out, const Table& table) {
  std::vector<std::size_t> width(table.align_.size(), 0);
  for (const auto& row : table.rows_) {
    for (std::size_t c = 0; c < width.size(); ++c) {
      width[c] = std::max(width[c], width_of(row.cells[c]));
    }
  }
  for (const auto& row : table.rows_) {
    std::string line = row.is_header ? "#" : " ";
    for (std::size_t c = 0; c < width.size(); ++c) {
      const std::string pad(width[c] - width_of(row.cells[c]), ' ');
      const bool left = table.align_[c] == Table::Align::kLeft;
      line += (c == 0 ? " " : "  ") + (left ? row.cells[c] + pad : pad + row.cells[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << '\n';
  }
  return out;
}

void Notes::add(std::string key, std::string text) {
  lines_.emplace_back(std::move(key), std::move(text));
}

std::ostream& operator<<(std::ostream& out, const Notes& notes) {
  std::size_t width = 0;
  for (const auto& [key, text] : notes.lines_) width = std::max(width, width_of(key));
  for (const auto& [key, text] : notes.lines_) {
    out << "# " << key << std::string(width - width_of(key), ' ') << "  " << text << '\n';
  }
  return out;
}

std::vector<std::string> folded(std::string_view text, std::size_t width) {
  std::vector<std::string> lines(1);
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    std::string& line = lines.back();
    if (line.empty()) {
      line = word;
    } else if (width_of(line) + 1 + width_of(word) <= width) {
      line.append(" ").append(word);
    } else {
      lines.emplace_back(word);
    }
    begin = end + 1;
  }
  return lines;
}

std::string formatted(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string milliseconds(double seconds) { return formatted("%.3f", 1e3 * seconds); }

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
