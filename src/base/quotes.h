#pragma once

#include <cstddef>
#include <string>
#include <string_view>

// How texts of a user stand in sentences: on one line, and not so long that they hide the sentence.

namespace uniep {

/// Bytes of a text that are shown in a sentence.
inline constexpr std::size_t kMostQuoted = 80;

/// The text with '?' for control characters and for bytes that are no UTF-8, and with "..." for its
/// middle where it has more than `most` bytes: of a path the end tells as much as the beginning.
std::string shortened(std::string_view text, std::size_t most = kMostQuoted);

/// The shortened text between single quotes. (`quoted` would be taken for that of the standard
/// library.)
std::string in_quotes(std::string_view text);

}  // namespace uniep
