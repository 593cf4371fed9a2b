#pragma once

#include <locale>
#include <sstream>
#include <string>

#include "uniep/error.h"

namespace uniep {

/// Joins its arguments with operator<<, whatever locale the program has set: ranks compare texts,
/// and files are read elsewhere. Where memory ends it throws, as streams by themselves do not.
template <class... Args>
std::string cat(const Args&... args) {
  std::ostringstream s;
  s.imbue(std::locale::classic());
  s.exceptions(std::ios::badbit);
  (s << ... << args);
  return s.str();
}

/// Throws Error(code) with the joined sentence unless `ok`. For checks at the boundary: the
/// sentence names the argument, its value and what would be accepted.
template <class... Args>
void require(bool ok, ErrorCode code, const Args&... sentence) {
  if (!ok) [[unlikely]]
    throw Error(code, cat(sentence...));
}

/// `require` for invariants of the library itself.
template <class... Args>
void ensure(bool ok, const Args&... sentence) {
  if (!ok) [[unlikely]]
    throw Error(ErrorCode::kInternal, cat("internal error: ", sentence...));
}

}  // namespace uniep
