#pragma once

#include <functional>
#include <initializer_list>
#include <iosfwd>
#include <string>

namespace uniep::tool {

/// A file that an option asks for. An empty path: none.
struct OutputFile {
  const char* option;
  const std::string& path;
};

/// Throws Error(kIo) where one of them could not be written, before the work whose result is to go
/// there, and Error(kInvalidArgument) where two are to be written to one file.
void require_writable(std::initializer_list<OutputFile> files);

/// Writes a text file; Error(kIo) where that fails at any point.
void write_text(const std::string& path, const std::function<void(std::ostream&)>& write);

}  // namespace uniep::tool
