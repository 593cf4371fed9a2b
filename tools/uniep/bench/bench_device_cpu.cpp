#include <cstring>

#include "bench/bench_device.h"
#include "group/cpu_group.h"

namespace uniep::tool {
namespace {

class CpuBenchDevice final : public BenchDevice {
 public:
  std::shared_ptr<std::byte> allocate(std::int64_t bytes) override {
    const auto heap = std::make_shared<Heap>(bytes);
    return {heap, heap->data()};
  }

  void fill(std::span<bf16> to, const workload::Numbers& numbers, std::uint64_t first) override {
    numbers.stream.fill(first, to, numbers.scale);
  }

  void poison(std::span<std::byte> memory) override { std::ranges::fill(memory, std::byte{0xff}); }

  void upload(std::span<std::byte> to, const void* from) override {
    if (!to.empty()) std::memcpy(to.data(), from, to.size());
  }

  void download(void* to, std::span<const std::byte> from) override {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
  }

  std::int64_t count_differing(std::span<const std::byte> a, std::span<const std::byte> b,
                               int width) override {
    const auto step = static_cast<std::size_t>(width);
    std::int64_t differing = 0;
    for (std::size_t i = 0; i < a.size(); i += step) {
      differing += std::memcmp(&a[i], &b[i], step) == 0 ? 0 : 1;
    }
    return differing;
  }

  bool runs_ahead() const override { return false; }

  Bootstrap& bootstrap(const Communicator& member) const override {
    return dynamic_cast<CpuCommunicator&>(*member.impl());
  }

  std::optional<GemmSeconds> gemm_seconds(const BenchCase&, int, const BenchOptions&,
                                          std::span<const bf16>, std::span<const bf16>) override {
    return std::nullopt;
  }

  std::string no_gemms_reason() const override {
    return "the CPU backend has nothing to compare with";
  }
};

}  // namespace

std::unique_ptr<BenchDevice> cpu_bench_device() { return std::make_unique<CpuBenchDevice>(); }

}  // namespace uniep::tool
