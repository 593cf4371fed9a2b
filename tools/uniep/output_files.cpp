#include "output_files.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/check.h"

namespace uniep::tool {

namespace fs = std::filesystem;

namespace {

void require_writable_file(const char* option, const std::string& path) {
  std::error_code ignored;
  const fs::path file(path);
  require(!fs::is_directory(file, ignored), ErrorCode::kIo, option, " ", path, " is a folder");
  const fs::path folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  require(fs::is_directory(folder, ignored), ErrorCode::kIo, "cannot write ", option, " ", path,
          ": there is no folder ", folder.string());
  const bool exists = fs::exists(file, ignored);
  require(access(exists ? path.c_str() : folder.c_str(), W_OK) == 0, ErrorCode::kIo,
          "cannot write ", option, " ", path, ": ", std::strerror(errno));
}

/// Not of devices, such as /dev/null, which may take any number of outputs.
bool same_file(const std::string& a, const std::string& b) {
  std::error_code ignored;
  const fs::path file = fs::weakly_canonical(a, ignored);
  const fs::file_status status = fs::status(file, ignored);
  return (fs::is_regular_file(status) || !fs::exists(status)) &&
         file == fs::weakly_canonical(b, ignored);
}

}  // namespace

void require_writable(std::initializer_list<OutputFile> files) {
  for (auto file = files.begin(); file != files.end(); ++file) {
    if (file->path.empty()) continue;
    require_writable_file(file->option, file->path);
    const auto* other = std::find_if(
        files.begin(), file, [&](const OutputFile& f) { return same_file(f.path, file->path); });
    require(other == file, ErrorCode::kInvalidArgument, other->option, " and ", file->option,
            " are both to be written to ", file->path, "; a file for each is accepted");
  }
}

void write_text(const std::string& path, const std::function<void(std::ostream&)>& write) {
  errno = 0;
  std::ofstream out(path, std::ios::binary);
  if (out) write(out);
  out.close();
  require(!out.fail(), ErrorCode::kIo, "cannot write ", path, ": ",
          errno != 0 ? std::strerror(errno) : "the stream failed");
}

}  // namespace uniep::tool
