#pragma once

#include <string>
#include <string_view>

namespace uniep::trace {

/// A text as UTF-8: every byte that belongs to no character becomes U+FFFD. File names are any
/// bytes.
std::string to_utf8(std::string_view bytes);

}  // namespace uniep::trace
