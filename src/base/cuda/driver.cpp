#include "base/cuda/driver.h"

#include <cuda_runtime_api.h>

#include "base/check.h"
#include "base/cuda/check_cuda.h"
#include "base/env.h"

namespace uniep::cuda {
namespace {

constexpr int kMajor = 9, kMinor = 0;
constexpr const char* kNeeded =
    "; a Hopper GPU (compute capability 9.0, such as H100 or H200) with a driver for CUDA 13.0 or "
    "newer is accepted";

std::string version_text(int version) { return cat(version / 1000, ".", version % 1000 / 10); }

/// Why there is no device at all.
std::string no_device(cudaError_t error) {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    return cat("no CUDA driver was found", kNeeded);
  }
  if (error == cudaErrorInsufficientDriver) {
    return cat("the CUDA driver is for CUDA ", version_text(driver), kNeeded);
  }
  return cat("the CUDA driver finds no device it can use (", cudaGetErrorName(error), ": ",
             cudaGetErrorString(error), ")", kNeeded);
}

template <class Function>
Function driver_function(const char* name, unsigned version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_cuda(cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found),
             cat("look up ", name, " in the CUDA driver"));
  require(found == cudaDriverEntryPointSuccess && address != nullptr, ErrorCode::kUnsupported,
          "the CUDA driver has no ", name, kNeeded);
  return reinterpret_cast<Function>(address);
}

cudaDeviceProp properties_of(int ordinal) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, ordinal), "read the properties of the device");
  return properties;
}

}  // namespace

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::string device_problem(int ordinal) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();  // it was handled here
  if (error != cudaSuccess || count == 0) {
    return no_device(error == cudaSuccess ? cudaErrorNoDevice : error);
  }
  if (ordinal < 0 || ordinal >= count) {
    return cat("there is no CUDA device ", ordinal, "; LOCAL_RANK (or --ranks) asks for it, and ",
               count == 1 ? "only device 0 is visible" : cat("0 to ", count - 1, " are visible"),
               "; UNIEP_SHARE_DEVICE=1 lets ranks share GPUs, for tests and development, slow");
  }
  const cudaDeviceProp p = properties_of(ordinal);
  if (p.major == kMajor && p.minor == kMinor) return "";
  return cat("CUDA device ", ordinal, " is ", p.name, ", compute capability ", p.major, ".",
             p.minor, kNeeded);
}

void require_device(int ordinal) {
  const std::string problem = device_problem(ordinal);
  require(problem.empty(), ErrorCode::kUnsupported, problem);
}

bool has_context(int ordinal) {
  try {
    static const auto function =
        driver_function<PFN_cuDevicePrimaryCtxGetState_v7000>("cuDevicePrimaryCtxGetState", 7000);
    unsigned flags = 0;
    int active = 0;
    return function(ordinal, &flags, &active) != CUDA_SUCCESS || active != 0;
  } catch (const Error&) {
    return true;
  }
}

std::string device_text(int ordinal) {
  const cudaDeviceProp p = properties_of(ordinal);
  const double gib = static_cast<double>(p.totalGlobalMem) / (1 << 30);
  return cat(p.name, " (compute capability ", p.major, ".", p.minor, ", ", p.multiProcessorCount,
             " SMs, ", static_cast<int>(gib * 10) / 10.0, " GiB)");
}

int sms_to_hold(int ordinal) {
  int sms = 0;
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ordinal),
             "ask for the number of SMs");
  const int spare = env_spare_sms();
  require(spare + 2 <= sms, ErrorCode::kInvalidArgument, "environment variable UNIEP_SPARE_SMS is ",
          spare, "; CUDA device ", ordinal, " has ", sms, " SMs, two of which are needed at least");
  return sms - spare;
}

PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encode_tiled() {
  static const auto function =
      driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
  return function;
}

PFN_cuMemGetAddressRange_v3020 mem_get_address_range() {
  static const auto function =
      driver_function<PFN_cuMemGetAddressRange_v3020>("cuMemGetAddressRange", 3020);
  return function;
}

PFN_cuPointerGetAttribute_v4000 pointer_get_attribute() {
  static const auto function =
      driver_function<PFN_cuPointerGetAttribute_v4000>("cuPointerGetAttribute", 4000);
  return function;
}

}  // namespace uniep::cuda
