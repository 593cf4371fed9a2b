#include "group/cuda/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "base/check.h"
#include "base/env.h"

namespace uniep::cuda {
namespace {

constexpr int kOldest = NCCL_VERSION(2, 28, 0);

std::string version_text(int v) { return cat(v / 10000, ".", v / 100 % 100, ".", v % 100); }

/// Switches multicast off before NCCL is first used, which reads it from the environment then. If
/// NCCL is in this process already (PyTorch brings it), that may be too late to say.
void switch_multicast_off(const std::string& file) {
  const bool is_off = env_nccl_nvls_enable() == "0";
  void* loaded = is_off ? nullptr : dlopen(file.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (loaded != nullptr) dlclose(loaded);
  require(loaded == nullptr, ErrorCode::kUnsupported, "NCCL (", file,
          ") was loaded before uniep and may use NVLink multicast; NCCL_NVLS_ENABLE=0 in the "
          "environment of the process is accepted");
  setenv("NCCL_NVLS_ENABLE", "0", 1);
}

void* load(const std::string& file) {
  switch_multicast_off(file);
  void* library = dlopen(file.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (library != nullptr) return library;
  const char* reason = dlerror();
  throw Error(ErrorCode::kUnsupported,
              cat("NCCL cannot be loaded from UNIEP_NCCL_LIBRARY ", file, " (", reason,
                  "); a file of NCCL 2.28 or newer is accepted"));
}

/// Looks functions up in one library.
class Symbols {
 public:
  explicit Symbols(const std::string& file) : file_(file), library_(load(file)) {}

  template <class Function>
  bool optional(Function& function, const char* name) const {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    return function != nullptr;
  }

  template <class Function>
  void needed(Function& function, const char* name) const {
    require(optional(function, name), ErrorCode::kUnsupported, "NCCL in ", file_, " has no ", name,
            "; NCCL 2.28 or newer is accepted");
  }

 private:
  std::string file_;
  void* library_;  // stays loaded until the process ends
};

}  // namespace

NcclLibrary::NcclLibrary() {
  const std::string file = env_nccl_library();
  const Symbols symbols(file);
  decltype(&::ncclGetVersion) get_version = nullptr;
  symbols.needed(get_version, "ncclGetVersion");
  require(get_version(&version) == ncclSuccess && version >= kOldest, ErrorCode::kUnsupported,
          "NCCL in ", file, " is version ", version_text(version), "; 2.28 or newer is accepted");
  symbols.needed(error_string, "ncclGetErrorString");
  symbols.needed(last_error, "ncclGetLastError");
  symbols.needed(unique_id, "ncclGetUniqueId");
  symbols.needed(init, "ncclCommInitRankConfig");
  symbols.needed(async_error, "ncclCommGetAsyncError");
  symbols.needed(abort, "ncclCommAbort");
  symbols.needed(mem_alloc, "ncclMemAlloc");
  symbols.needed(mem_free, "ncclMemFree");
  symbols.needed(window_register, "ncclCommWindowRegister");
  symbols.needed(window_deregister, "ncclCommWindowDeregister");
  symbols.needed(lsa_team, "ncclTeamLsa");
  // The layout of a window, which a kernel reads, is that of the headers' version.
  const bool same_minor = version / 100 == NCCL_VERSION_CODE / 100;
  require(symbols.optional(lsa_pointer, "ncclGetLsaDevicePointer") || same_minor,
          ErrorCode::kUnsupported, "NCCL in ", file, " is version ", version_text(version),
          ", and uniep was built for ", version_text(NCCL_VERSION_CODE),
          "; the same minor version, or one with ncclGetLsaDevicePointer, is accepted");
}

const NcclLibrary& NcclLibrary::get() {
  static const NcclLibrary library;
  return library;
}

void NcclLibrary::check(ncclResult_t result, const char* what) const {
  if (result == ncclSuccess) [[likely]]
    return;
  const std::string detail = last_error(nullptr);
  throw Error(ErrorCode::kDevice,
              cat("cannot ", what, ": NCCL says ", error_string(result),
                  detail.empty() ? "" : cat(" (", detail.substr(0, detail.find('\n')), ")")));
}

}  // namespace uniep::cuda
