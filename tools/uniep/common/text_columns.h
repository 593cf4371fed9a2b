#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace uniep::tool {

/// Columns that a UTF-8 text takes on a terminal: wide characters take two, combining ones none. A
/// byte that belongs to no character counts as one.
std::size_t columns_of(std::string_view text);

/// The text in at most so many columns, characters whole. What is cut ends with "…".
std::string cut_to_columns(std::string_view text, std::size_t columns);

}  // namespace uniep::tool
