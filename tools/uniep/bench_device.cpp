#include "bench_device.h"

#include <cstring>

#include "comm/cpu_group.h"

namespace uniep::tool {

std::shared_ptr<std::byte> CpuBenchDevice::allocate(std::int64_t bytes) {
  const auto heap = std::make_shared<Heap>(bytes);
  return {heap, heap->data()};
}

void CpuBenchDevice::fill(std::span<bf16> to, const workload::Numbers& numbers,
                          std::uint64_t first) {
  numbers.stream.fill(first, to, numbers.scale);
}

void CpuBenchDevice::poison(std::span<std::byte> memory) {
  std::ranges::fill(memory, std::byte{0xff});
}

void CpuBenchDevice::upload(std::span<std::byte> to, const void* from) {
  if (!to.empty()) std::memcpy(to.data(), from, to.size());
}

void CpuBenchDevice::download(void* to, std::span<const std::byte> from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

std::int64_t CpuBenchDevice::count_differing(std::span<const std::byte> a,
                                             std::span<const std::byte> b, int width) {
  const auto step = static_cast<std::size_t>(width);
  std::int64_t differing = 0;
  for (std::size_t i = 0; i < a.size(); i += step) {
    differing += std::memcmp(&a[i], &b[i], step) == 0 ? 0 : 1;
  }
  return differing;
}

Bootstrap& CpuBenchDevice::bootstrap(const Communicator& member) const {
  return dynamic_cast<CpuCommunicator&>(*member.impl());
}

}  // namespace uniep::tool
