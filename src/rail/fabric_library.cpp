#include "rail/fabric_library.h"

#include <dlfcn.h>
#include <signal.h>

#include <cerrno>
#include <cstdlib>

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

/// Keeps libinfinipath, which libfabric loads, from putting handlers of its own in place of the
/// program's: one ends it with exit code 1, or waits for a lock that the signal came under. They
/// hold for all threads, so nobody can keep signals away from them.
class NoBacktraces {
 public:
  NoBacktraces() {
    if (!is_set_) setenv(kVariable, "1", 0);
  }
  ~NoBacktraces() {
    if (!is_set_) unsetenv(kVariable);
  }
  NoBacktraces(const NoBacktraces&) = delete;
  NoBacktraces& operator=(const NoBacktraces&) = delete;

 private:
  static constexpr char kVariable[] = "IPATH_NO_BACKTRACE";
  const bool is_set_ = std::getenv(kVariable) != nullptr;
};

/// Handles signals afterwards as before, whatever other libraries that libfabric loads do.
class KeptSignalHandlers {
 public:
  KeptSignalHandlers() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &mask_);
    for (int i = 1; i < kCount; ++i) known_[i] = sigaction(i, nullptr, &before_[i]) == 0;
  }
  ~KeptSignalHandlers() {
    for (int i = 1; i < kCount; ++i) {
      if (known_[i]) sigaction(i, &before_[i], nullptr);
    }
    pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
  }
  KeptSignalHandlers(const KeptSignalHandlers&) = delete;
  KeptSignalHandlers& operator=(const KeptSignalHandlers&) = delete;

 private:
  static constexpr int kCount = 65;  // Linux has 64
  struct sigaction before_[kCount] = {};
  bool known_[kCount] = {};
  sigset_t mask_;
};

void* open_library() {
  const NoBacktraces none;
  const KeptSignalHandlers kept;
  return dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
}

FabricLibrary load_all() {
  void* const library = open_library();
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
          " failed: ", strerror(static_cast<int>(-result)),
          result == -EMFILE ? "; more of them (ulimit -n) are accepted" : "");
}

}  // namespace uniep::rail
