#include "output_files.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/check.h"

namespace uniep::tool {

namespace fs = std::filesystem;

void require_writable(const std::string& option, const std::string& path) {
  if (path.empty()) return;
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

void write_text(const std::string& path, const std::function<void(std::ostream&)>& write) {
  errno = 0;
  std::ofstream out(path, std::ios::binary);
  if (out) write(out);
  out.close();
  require(!out.fail(), ErrorCode::kIo, "cannot write ", path, ": ",
          errno != 0 ? std::strerror(errno) : "the stream failed");
}

}  // namespace uniep::tool
