#pragma once

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

namespace uniep::tool {

/// A file that an option names. An empty path: none.
struct NamedFile {
  std::string option;
  std::string path;
};

/// Refuses outputs before the work whose results are to go there: Error(kIo) where one could not be
/// written, Error(kInvalidArgument) where two are one file, or one is an input, however it is
/// linked. Devices may take any number of outputs.
void require_usable_outputs(const std::vector<NamedFile>& outputs,
                            const std::vector<NamedFile>& inputs);

/// The cache of tuned schedules and what is kept beside it, as inputs that no output may replace.
std::vector<NamedFile> tuned_files();

/// The file that --profile or the like names; nothing of a shipped profile's name.
NamedFile profile_file(const char* option, const std::string& file_or_name);

/// Writes a text as an OutputFile, so that the path holds all of it or what it held before.
void write_text(const std::string& path, const std::function<void(std::ostream&)>& write);

}  // namespace uniep::tool
