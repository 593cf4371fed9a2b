#include "bench_device_cuda.h"

#include "bench_gemms.h"
#include "bench_kernels.h"
#include "cublas_library.h"
#include "cuda/cuda_communicator.h"
#include "cuda/device_array.h"

namespace uniep::tool {

using cuda::check_cuda;
using cuda::DeviceArray;

std::shared_ptr<std::byte> CudaBenchDevice::allocate(std::int64_t bytes) {
  const auto array = std::make_shared<DeviceArray<std::byte>>(bytes);
  return {array, array->data()};
}

void CudaBenchDevice::fill(std::span<bf16> to, const workload::Numbers& numbers,
                           std::uint64_t first) {
  if (to.empty()) return;
  check_cuda(launch_fill_normal(to.data(), static_cast<std::int64_t>(to.size()),
                                numbers.stream.key(), first, numbers.scale),
             "launch fill");
}

void CudaBenchDevice::poison(std::span<std::byte> memory) {
  if (memory.empty()) return;
  check_cuda(cudaMemset(memory.data(), 0xff, memory.size()), "poison a tensor");
}

void CudaBenchDevice::upload(std::span<std::byte> to, const void* from) {
  if (to.empty()) return;
  check_cuda(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyHostToDevice), "copy to the device");
}

void CudaBenchDevice::download(void* to, std::span<const std::byte> from) {
  if (from.empty()) return;
  check_cuda(cudaMemcpy(to, from.data(), from.size(), cudaMemcpyDeviceToHost),
             "copy from the device");
}

std::int64_t CudaBenchDevice::count_differing(std::span<const std::byte> a,
                                              std::span<const std::byte> b, int width) {
  const auto count = static_cast<std::int64_t>(a.size()) / width;
  const DeviceArray<unsigned long long> differing(1);
  const auto launch = [&](auto word) {
    using Word = decltype(word);
    return launch_count_differing(reinterpret_cast<const Word*>(a.data()),
                                  reinterpret_cast<const Word*>(b.data()), count, differing.data());
  };
  check_cuda(width == 2 ? launch(std::uint16_t{}) : launch(std::uint32_t{}), "launch comparison");
  return static_cast<std::int64_t>(differing.to_host()[0]);
}

Bootstrap& CudaBenchDevice::bootstrap(const Communicator& member) const {
  return dynamic_cast<cuda::CudaCommunicator&>(*member.impl()).bootstrap();
}

std::optional<GemmSeconds> CudaBenchDevice::gemm_seconds(const BenchCase& bench,
                                                         const BenchOptions& options,
                                                         std::span<const bf16> w1,
                                                         std::span<const bf16> w2) {
  if (!no_gemms_reason().empty()) return std::nullopt;
  return time_gemms(bench, options, w1, w2);
}

std::string CudaBenchDevice::no_gemms_reason() const { return CublasLibrary::get().missing(); }

}  // namespace uniep::tool
