#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "bench/bench_case.h"
#include "bench/bench_figures.h"
#include "group/bootstrap.h"
#include "uniep/communicator.h"

namespace uniep::tool {

/// The memory that a rank's tensors lie in, and what a benchmark does there besides passes.
class BenchDevice {
 public:
  virtual ~BenchDevice() = default;

  virtual std::shared_ptr<std::byte> allocate(std::int64_t bytes) = 0;
  /// `to[i]` becomes number `first + i`; `first` is even.
  virtual void fill(std::span<bf16> to, const workload::Numbers& numbers, std::uint64_t first) = 0;
  /// Every bit set: a NaN in every floating point type.
  virtual void poison(std::span<std::byte> memory) = 0;
  virtual void upload(std::span<std::byte> to, const void* from) = 0;
  virtual void download(void* to, std::span<const std::byte> from) = 0;
  /// Elements of `width` bytes, 2 or 4, that differ in any bit.
  virtual std::int64_t count_differing(std::span<const std::byte> a, std::span<const std::byte> b,
                                       int width) = 0;

  /// Whether passes return before they are done.
  virtual bool runs_ahead() const = 0;
  virtual Bootstrap& bootstrap(const Communicator& member) const = 0;

  /// Medians of a rank's bare GEMMs, its rows spread evenly over its experts; `w1` and `w2` are its
  /// weights. Nothing where `no_gemms_reason` has a sentence.
  virtual std::optional<GemmSeconds> gemm_seconds(const BenchCase& bench, int rank,
                                                  const BenchOptions& options,
                                                  std::span<const bf16> w1,
                                                  std::span<const bf16> w2) = 0;
  virtual std::string no_gemms_reason() const = 0;
};

/// A tensor on a device.
template <class T>
class BenchTensor {
 public:
  BenchTensor() = default;
  BenchTensor(BenchDevice& device, std::int64_t count)
      : memory_(device.allocate(count * static_cast<std::int64_t>(sizeof(T)))), count_(count) {}

  std::span<T> span() const {
    return {reinterpret_cast<T*>(memory_.get()), static_cast<std::size_t>(count_)};
  }
  std::span<std::byte> bytes() const { return std::as_writable_bytes(span()); }

 private:
  std::shared_ptr<std::byte> memory_;
  std::int64_t count_ = 0;
};

/// The memory of this process.
std::unique_ptr<BenchDevice> cpu_bench_device();

/// The memory of this thread's GPU; in builds with the CUDA backend.
std::unique_ptr<BenchDevice> cuda_bench_device();

}  // namespace uniep::tool
