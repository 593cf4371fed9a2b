#include "tune_key.h"

#ifdef UNIEP_HAS_CUDA
#include <cuda_runtime.h>

#include "cuda/check.h"
#include "cuda/driver.h"
#endif
#include "base/check.h"
#include "machine.h"
#include "options.h"
#include "uniep/version.h"

namespace uniep::tool {
namespace {

#ifdef UNIEP_HAS_CUDA
std::string cuda_driver() {
  int version = 0;
  cuda::check_cuda(cudaDriverGetVersion(&version), "ask for the version of the CUDA driver");
  return cat("CUDA ", version / 1000, '.', version % 1000 / 10);
}

int multiprocessors() {
  int device = 0;
  int count = 0;
  cuda::check_cuda(cudaGetDevice(&device), "ask for the device");
  cuda::check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
                   "ask for the number of SMs");
  return count;
}
#endif

std::string device_of(Backend backend) {
#ifdef UNIEP_HAS_CUDA
  if (backend == Backend::kCuda) return cuda::device_text(0);
#endif
  (void)backend;
  const Machine machine = this_machine();
  const std::string link = link_text();
  return cat(machine.cpu, ", ", machine.cpus, " CPUs", link.empty() ? "" : ", link " + link);
}

std::string driver_of(Backend backend) {
#ifdef UNIEP_HAS_CUDA
  if (backend == Backend::kCuda) return cuda_driver();
#endif
  (void)backend;
  return this_machine().isa;
}

}  // namespace

tune::TuneKey tune_key(Backend backend, const Problem& problem, int ranks, std::int64_t tokens,
                       double skew, Pass pass) {
  return {.backend = backend,
          .device = device_of(backend),
          .driver = driver_of(backend),
          .library = UNIEP_VERSION_STRING,
          .hidden = problem.hidden,
          .intermediate = problem.intermediate,
          .num_experts = problem.num_experts,
          .topk = problem.topk,
          .ranks = ranks,
          .pass = pass,
          .tokens = tune::token_bucket(tokens),
          .skew = skew};
}

Place this_place(Backend backend) {
#ifdef UNIEP_HAS_CUDA
  if (backend == Backend::kCuda) return {backend, multiprocessors()};
#endif
  return {backend, 0};
}

}  // namespace uniep::tool
