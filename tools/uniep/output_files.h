#pragma once

#include <functional>
#include <iosfwd>
#include <string>

namespace uniep::tool {

/// Throws Error(kIo) where no file could be written at `path`, before the work whose result is to
/// go there. An empty path is fine.
void require_writable(const std::string& option, const std::string& path);

/// Writes a text file; Error(kIo) where that fails at any point.
void write_text(const std::string& path, const std::function<void(std::ostream&)>& write);

}  // namespace uniep::tool
