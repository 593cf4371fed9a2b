// Inputs made where they are needed, and results compared where they are: layers of large models
// are too big to pass through the host.
#include "bench/bench_kernels.h"
#include "workload/normal.h"

namespace uniep::tool {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 132 * 8;

__device__ std::int64_t global_thread() {
  return std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
}
__device__ std::int64_t global_threads() { return std::int64_t{gridDim.x} * kThreads; }

__global__ void __launch_bounds__(kThreads)
    fill_normal_kernel(bf16* to, std::int64_t count, std::uint64_t key, std::uint64_t first,
                       double scale) {
  for (std::int64_t i = 2 * global_thread(); i < count; i += 2 * global_threads()) {
    const workload::NormalPair pair = workload::normal_pair(key, (first + i) / 2);
    to[i] = to_bf16(static_cast<float>(scale * pair.even));
    if (i + 1 < count) to[i + 1] = to_bf16(static_cast<float>(scale * pair.odd));
  }
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    count_differing_kernel(const Word* a, const Word* b, std::int64_t count,
                           unsigned long long* differing) {
  unsigned long long own = 0;
  for (std::int64_t i = global_thread(); i < count; i += global_threads()) own += a[i] != b[i];
  if (own > 0) atomicAdd(differing, own);  // rare: nothing should differ
}

template <class Word>
cudaError_t count_differing(const Word* a, const Word* b, std::int64_t count,
                            unsigned long long* differing) {
  count_differing_kernel<<<kBlocks, kThreads>>>(a, b, count, differing);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_fill_normal(bf16* to, std::int64_t count, std::uint64_t key, std::uint64_t first,
                               double scale) {
  fill_normal_kernel<<<kBlocks, kThreads>>>(to, count, key, first, scale);
  return cudaGetLastError();
}

cudaError_t launch_count_differing(const std::uint16_t* a, const std::uint16_t* b,
                                   std::int64_t count, unsigned long long* differing) {
  return count_differing(a, b, count, differing);
}

cudaError_t launch_count_differing(const std::uint32_t* a, const std::uint32_t* b,
                                   std::int64_t count, unsigned long long* differing) {
  return count_differing(a, b, count, differing);
}

}  // namespace uniep::tool
