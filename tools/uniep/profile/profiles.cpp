#include "profile/profiles.h"

#include <filesystem>

#include "base/check.h"
#include "tune/files/shipped_files.h"

namespace uniep::tool {

tune::MachineProfile find_profile(const std::string& file_or_name) {
  std::error_code ignored;
  const bool is_path = file_or_name.find_first_of("./") != std::string::npos;
  if (is_path || std::filesystem::exists(file_or_name, ignored)) {
    return tune::read_profile(file_or_name);
  }
  return tune::shipped_profile(file_or_name);
}

std::string shipped_profile_names() {
  std::string names;
  for (const tune::ShippedFile& file : tune::shipped_profiles()) {
    names += cat(names.empty() ? "" : ", ", file.name);
  }
  return names;
}

}  // namespace uniep::tool
