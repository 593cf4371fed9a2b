#pragma once

#include <span>
#include <string>
#include <string_view>

namespace uniep {

/// The name that a mistyped one was probably meant to be: the one that takes the fewest letters
/// put in, left out, changed or swapped with the next, if those are less than about a third of it,
/// one that begins with it, or one that has its letters in another order. Empty: none is near.
std::string nearest(std::string_view mistyped, std::span<const std::string> names);

/// "single is the nearest; ", for the middle of a sentence; empty: none is near.
std::string nearest_clause(std::string_view mistyped, std::span<const std::string> names);

}  // namespace uniep
