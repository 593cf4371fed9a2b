#include "cuda/cuda_communicator.h"

#include <fstream>

#include "base/env.h"
#include "cuda/check.h"
#include "cuda/device_scope.h"
#include "cuda/driver.h"
#include "cuda/symmetric_mapping.h"

namespace uniep::cuda {
namespace {

/// The same in all containers of a host, and different on any two hosts.
std::string host_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::string use_device(int device) {
  require_device(device);
  check_cuda(cudaSetDevice(device), cat("use CUDA device ", device));
  check_cuda(cudaFree(nullptr), cat("use CUDA device ", device));  // makes the context
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device), "read the device's properties");
  return {properties.uuid.bytes, sizeof(properties.uuid.bytes)};
}

/// Every rank sees the same lists, so all refuse alike.
void require_own_devices(const std::vector<std::string>& hosts,
                         const std::vector<std::string>& devices) {
  for (std::size_t b = 1; b < devices.size(); ++b) {
    require(hosts[b] == hosts[0], ErrorCode::kUnsupported, "ranks 0 and ", b,
            " run on different hosts; a group whose GPUs are all in one host is accepted");
    for (std::size_t a = 0; a < b; ++a) {
      require(devices[a] != devices[b], ErrorCode::kInvalidArgument, "ranks ", a, " and ", b,
              " use the same GPU; one GPU for each rank (LOCAL_RANK) is accepted");
    }
  }
}

}  // namespace

CudaCommunicator::CudaCommunicator(const ProcessEnvironment& environment, int limit_ms)
    : rank_(environment.rank),
      size_(environment.size),
      device_(environment.local_rank),
      bootstrap_(rank_, size_, environment.master_address, environment.master_port, limit_ms) {
  const auto devices =
      together(bootstrap_, limit_ms, "CUDA communicator", [&] { return use_device(device_); });
  const auto hosts = bootstrap_.all_gather(host_id(), "connect", limit_ms);
  require_own_devices(hosts, devices);
}

std::unique_ptr<SymmetricMemory> CudaCommunicator::symmetric_memory(std::int64_t bytes,
                                                                    int limit_ms) {
  const DeviceScope scope(device_);
  return std::make_unique<SymmetricMemory>(bootstrap_, rank_, size_, bytes, limit_ms);
}

Communicator single_rank() {
  ProcessEnvironment alone;
  check_cuda(cudaGetDevice(&alone.local_rank), "ask for the current device");
  return Communicator(std::make_shared<CudaCommunicator>(alone, env_timeout_ms()));
}

std::shared_ptr<CommunicatorImpl> communicator_from_environment() {
  return std::make_shared<CudaCommunicator>(process_environment().value_or(ProcessEnvironment{}),
                                            env_timeout_ms());
}

}  // namespace uniep::cuda
