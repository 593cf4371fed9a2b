#include <limits>

#include "cuda/add_rows.h"
#include "cuda/device/token_sums.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/kernels/start_kernel.h"
#include "uniep/problem.h"

namespace uniep::cuda {
namespace {

constexpr int kAddThreads = 128;

/// A CTA for each token.
__global__ void __launch_bounds__(kAddThreads)
    add_rows_kernel(const __grid_constant__ RowSums sums) {
  __shared__ const Vector* rows[kMaxTopk];
  const int topk = sums.topk;
  const std::int64_t token = blockIdx.x;
  const std::int32_t* ids = sums.ids + token * topk;
  const float* factors = sums.factors == nullptr ? nullptr : sums.factors + token * topk;
  const int mine = static_cast<int>(threadIdx.x);
  bool is_kept = false, is_lost = false;
  if (mine < topk) {
    is_kept = ids[mine] >= 0;
    const bf16* row = is_kept ? sums.row_of(token * topk + mine) : nullptr;
    rows[mine] = reinterpret_cast<const Vector*>(row);
    is_lost = is_kept && row == nullptr;
  }
  __shared__ unsigned kept_slots, lost_slots;
  if (mine < 32) {
    const unsigned kept = __ballot_sync(kWholeWarp, is_kept);
    const unsigned lost = __ballot_sync(kWholeWarp, is_lost);
    if (mine == 0) kept_slots = kept, lost_slots = lost;
  }
  __syncthreads();
  const unsigned kept = kept_slots & ~lost_slots;
  const float start = lost_slots == 0 ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  const int vectors = static_cast<int>(sums.hidden / kVectorElements);
  auto* out = reinterpret_cast<Vector*>(sums.out + token * sums.hidden);
  for (int i = mine; i < vectors; i += kAddThreads) {
    const auto load = [&](int k) { return (kept >> k & 1) != 0 ? __ldcs(rows[k] + i) : Vector{}; };
    float total[kVectorElements];
#pragma unroll
    for (float& sum : total) sum = start;
    GroupsOfToken groups(ids, topk, sums.group_experts, kept);
    for (unsigned group = groups.next(); group != 0; group = groups.next()) {
      float part[kVectorElements] = {};
      add_slots<true>(part, load, 0, topk, group, factors);
      add_partial(total, part, sums.group_experts > 0 && sums.rounds);
    }
    __stcs(out + i, rounded_vector(total));
  }
}

}  // namespace

cudaError_t launch_add_rows(const RowSums& sums, cudaStream_t stream) {
  return launch_kernel(add_rows_kernel,
                       {.ctas = static_cast<int>(sums.tokens), .threads = kAddThreads}, stream,
                       sums);
}

}  // namespace uniep::cuda
