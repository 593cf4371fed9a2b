#include "bench/cublas_library.h"

#include <dlfcn.h>

#include "base/check.h"

namespace uniep::tool {
namespace {

constexpr const char* kFiles[] = {"libcublas.so.13", "libcublas.so.12"};

/// False where the library has no such function.
template <class Function>
bool look_up(void* library, Function*& function, const char* name) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

CublasLibrary::CublasLibrary() {
  void* library = nullptr;  // stays loaded until the process ends
  for (const char* file : kFiles) {
    if ((library = dlopen(file, RTLD_LAZY | RTLD_LOCAL)) == nullptr) continue;
    file_ = file;
    break;
  }
  if (library == nullptr) {
    missing_ = cat("neither ", kFiles[0], " nor ", kFiles[1],
                   " can be loaded (LD_LIBRARY_PATH may name their folder)");
    return;
  }
  const bool complete = look_up(library, create, "cublasCreate_v2") &&
                        look_up(library, destroy, "cublasDestroy_v2") &&
                        look_up(library, status_string, "cublasGetStatusString") &&
                        look_up(library, gemm_strided_batched, "cublasGemmStridedBatchedEx");
  if (!complete) missing_ = cat(file_, " lacks a function that is needed");
}

const CublasLibrary& CublasLibrary::get() {
  static const CublasLibrary library;
  return library;
}

void CublasLibrary::check(cublasStatus_t status, const char* what) const {
  require(status == CUBLAS_STATUS_SUCCESS, ErrorCode::kDevice, "cannot ", what, ": cuBLAS says ",
          status_string(status));
}

}  // namespace uniep::tool
