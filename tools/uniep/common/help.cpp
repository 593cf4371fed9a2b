#include "common/help.h"

#include <algorithm>

#include "common/table.h"
#include "common/text_columns.h"

namespace uniep::tool {
namespace {

constexpr std::string_view kExample = "  uniep ";

/// Breaks an example in front of its flags.
std::string narrowed_example(std::string_view line) {
  const std::string indent(6, ' ');
  std::string text, last;
  for (std::size_t begin = 0; begin < line.size();) {
    const std::size_t end = std::min(line.find(" --", begin + 1), line.size());
    const std::string_view part = line.substr(begin, end - begin);
    if (!last.empty() && columns_of(last) + columns_of(part) + 2 > kTextColumns) {
      text += last + " \\\n";
      last = indent;
      last += part.substr(1);
    } else {
      last += part;
    }
    begin = end;
  }
  return text + last;
}

/// The beginning of the text below which a line goes on: behind what it describes.
std::size_t begin_of_text(std::string_view line) {
  const std::size_t word = std::min(line.find_first_not_of(' '), line.size());
  const std::size_t gap = word == 0 ? line.npos : line.find("  ", word);
  return gap == line.npos ? word : std::min(line.find_first_not_of(' ', gap), line.size());
}

std::string narrowed_line(std::string_view line) {
  if (columns_of(line) <= kTextColumns) return std::string(line);
  if (line.starts_with(kExample)) return narrowed_example(line);
  const std::size_t begin = begin_of_text(line);
  std::string text = paragraph(line.substr(0, begin), std::string(begin, ' '), line.substr(begin));
  text.pop_back();  // its last line break
  return text;
}

}  // namespace

std::string narrowed(std::string_view help) {
  std::string text;
  for (std::size_t begin = 0; begin < help.size();) {
    const std::size_t end = std::min(help.find('\n', begin), help.size());
    text += narrowed_line(help.substr(begin, end - begin)) + '\n';
    begin = end + 1;
  }
  return text;
}

}  // namespace uniep::tool
