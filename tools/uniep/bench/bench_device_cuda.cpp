#include "bench/bench_device.h"
#include "bench/bench_gemms.h"
#include "bench/bench_kernels.h"
#include "bench/cublas_library.h"
#include "cuda/device_array.h"
#include "group/cuda/cuda_communicator.h"

namespace uniep::tool {
namespace {

using cuda::check_cuda;
using cuda::DeviceArray;

class CudaBenchDevice final : public BenchDevice {
 public:
  std::shared_ptr<std::byte> allocate(std::int64_t bytes) override {
    const auto array = std::make_shared<DeviceArray<std::byte>>(bytes);
    return {array, array->data()};
  }

  void fill(std::span<bf16> to, const workload::Numbers& numbers, std::uint64_t first) override {
    if (to.empty()) return;
    check_cuda(launch_fill_normal(to.data(), static_cast<std::int64_t>(to.size()),
                                  numbers.stream.key(), first, numbers.scale),
               "launch fill");
  }

  void poison(std::span<std::byte> memory) override {
    if (memory.empty()) return;
    check_cuda(cudaMemset(memory.data(), 0xff, memory.size()), "poison a tensor");
  }

  void upload(std::span<std::byte> to, const void* from) override {
    if (to.empty()) return;
    check_cuda(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyHostToDevice),
               "copy to the device");
  }

  void download(void* to, std::span<const std::byte> from) override {
    if (from.empty()) return;
    check_cuda(cudaMemcpy(to, from.data(), from.size(), cudaMemcpyDeviceToHost),
               "copy from the device");
  }

  std::int64_t count_differing(std::span<const std::byte> a, std::span<const std::byte> b,
                               int width) override {
    const auto count = static_cast<std::int64_t>(a.size()) / width;
    const DeviceArray<unsigned long long> differing(1);
    const auto launch = [&](auto word) {
      using Word = decltype(word);
      return launch_count_differing(reinterpret_cast<const Word*>(a.data()),
                                    reinterpret_cast<const Word*>(b.data()), count,
                                    differing.data());
    };
    check_cuda(width == 2 ? launch(std::uint16_t{}) : launch(std::uint32_t{}), "launch comparison");
    return static_cast<std::int64_t>(differing.to_host()[0]);
  }

  bool runs_ahead() const override { return true; }

  Bootstrap& bootstrap(const Communicator& member) const override {
    return dynamic_cast<cuda::CudaCommunicator&>(*member.impl()).bootstrap();
  }

  std::optional<GemmSeconds> gemm_seconds(const BenchCase& bench, int rank,
                                          const BenchOptions& options, std::span<const bf16> w1,
                                          std::span<const bf16> w2) override {
    if (!no_gemms_reason().empty()) return std::nullopt;
    return time_gemms(bench, rank, options, w1, w2);
  }

  std::string no_gemms_reason() const override { return CublasLibrary::get().missing(); }
};

}  // namespace

std::unique_ptr<BenchDevice> cuda_bench_device() { return std::make_unique<CudaBenchDevice>(); }

}  // namespace uniep::tool
