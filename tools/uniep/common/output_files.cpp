#include "common/output_files.h"

#include <filesystem>
#include <iostream>
#include <optional>

#include "base/check.h"
#include "base/destination.h"
#include "base/env.h"
#include "base/files.h"
#include "base/output_file.h"
#include "common/file_streambuf.h"
#include "tune/files/shared_files.h"
#include "tune/search/session.h"

namespace uniep::tool {

namespace fs = std::filesystem;

namespace {

std::string shown(const NamedFile& file) { return cat(file.option, ' ', display_name(file.path)); }

void require_writable_file(const NamedFile& output) {
  try {
    require_writable(output.path);
  } catch (const Error& e) {
    throw Error(e.code(), cat("cannot write ", output.option, ' ', e.what()));
  }
}

bool same_file(const NamedFile& a, const NamedFile& b) {
  if (a.path.empty() || b.path.empty()) return false;
  const auto identity = identity_of(a.path);
  return identity && identity == identity_of(b.path);
}

void require_apart(const NamedFile& output, const NamedFile& other, bool is_input) {
  require(!same_file(output, other), ErrorCode::kInvalidArgument, shown(output), " and ",
          shown(other), " are one file",
          is_input ? ", which the output would replace; another file is accepted for the output"
                   : "; a file for each is accepted");
}

}  // namespace

void require_usable_outputs(const std::vector<NamedFile>& outputs,
                            const std::vector<NamedFile>& inputs) {
  for (auto output = outputs.begin(); output != outputs.end(); ++output) {
    if (output->path.empty()) continue;
    for (const NamedFile& input : inputs) require_apart(*output, input, true);
    require_apart(*output, {"the program", "/proc/self/exe"}, true);
    for (auto earlier = outputs.begin(); earlier != output; ++earlier) {
      require_apart(*earlier, *output, false);
    }
    require_writable_file(*output);
  }
}

std::vector<NamedFile> tuned_files() {
  const std::string cache = env_tune_cache();
  if (cache.empty()) return {};
  // The cache may yet be made; its lock and the sessions of searches are beside it.
  const char* option = "UNIEP_TUNE_CACHE";
  std::vector<NamedFile> files{{option, cache}, {option, tune::lock_of(cache)}};
  for (const std::string& path : tune::session_files(cache)) files.push_back({option, path});
  for (const std::string& path : tune::damaged_files(cache)) files.push_back({option, path});
  return files;
}

NamedFile profile_file(const char* option, const std::string& file_or_name) {
  std::error_code none;
  return {option, fs::exists(file_or_name, none) ? file_or_name : ""};
}

void write_text(const std::string& path, const std::function<void(std::ostream&)>& write) {
  std::cout << std::flush;  // in this order, where the path is the standard output
  OutputFile file(path);
  FileStreambuf buffer(file);
  std::ostream out(&buffer);
  write(out);
  buffer.finish();
  require(out.good(), ErrorCode::kInternal, "internal error: ", path, " could not be put together");
  file.commit();
}

}  // namespace uniep::tool
