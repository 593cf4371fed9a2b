#include "rail/fabric_library.h"

#include <dlfcn.h>

#include "base/check.h"

namespace uniep::rail {
namespace {

constexpr char kFile[] = "libfabric.so.1";

template <class Function>
void load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  require(function != nullptr, ErrorCode::kUnsupported, kFile, " has no function ", name,
          "; libfabric 1.17 or newer is accepted");
}

FabricLibrary load_all() {
  void* const library = dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
  const char* const why = library == nullptr ? dlerror() : nullptr;
  require(library != nullptr, ErrorCode::kUnsupported,
          "a group of several hosts needs libfabric, which cannot be loaded (", why ? why : "",
          "); one host is accepted, or a machine with it (Debian: libfabric1)");
  FabricLibrary functions;
  load(library, "fi_getinfo", functions.getinfo);
  load(library, "fi_freeinfo", functions.freeinfo);
  load(library, "fi_dupinfo", functions.dupinfo);
  load(library, "fi_fabric", functions.fabric);
  load(library, "fi_strerror", functions.strerror);
  return functions;
}

}  // namespace

const FabricLibrary& FabricLibrary::get() {
  static const FabricLibrary library = load_all();  // never unloaded: it has threads of its own
  return library;
}

void FabricLibrary::check(long result, const char* call) const {
  require(result >= 0, ErrorCode::kDevice, "libfabric: ", call,
          " failed: ", strerror(static_cast<int>(-result)));
}

}  // namespace uniep::rail
