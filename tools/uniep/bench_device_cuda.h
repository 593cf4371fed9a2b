#pragma once

#include "bench_device.h"

namespace uniep::tool {

/// The memory of this thread's GPU.
class CudaBenchDevice final : public BenchDevice {
 public:
  std::shared_ptr<std::byte> allocate(std::int64_t bytes) override;
  void fill(std::span<bf16> to, const workload::Numbers& numbers, std::uint64_t first) override;
  void poison(std::span<std::byte> memory) override;
  void upload(std::span<std::byte> to, const void* from) override;
  void download(void* to, std::span<const std::byte> from) override;
  std::int64_t count_differing(std::span<const std::byte> a, std::span<const std::byte> b,
                               int width) override;
  bool runs_ahead() const override { return true; }
  Bootstrap& bootstrap(const Communicator& member) const override;
  std::optional<GemmSeconds> gemm_seconds(const BenchCase& bench, const BenchOptions& options,
                                          std::span<const bf16> w1,
                                          std::span<const bf16> w2) override;
  std::string no_gemms_reason() const override;
};

}  // namespace uniep::tool
