#pragma once

#include "cuda/device/fragments.cuh"
#include "cuda/device/waits.cuh"

namespace uniep::cuda {

/// 8 elements of bf16.
using Vector = uint4;
inline constexpr int kVectorElements = 8;

/// sum[i] += v[i] for 8 elements.
__device__ __forceinline__ void add_vector(float (&sum)[kVectorElements], const Vector& v) {
  const std::uint32_t pairs[] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = sum[2 * i] + low_of(pairs[i]);
    sum[2 * i + 1] = sum[2 * i + 1] + high_of(pairs[i]);
  }
}

/// out[t] or dx[t]: the sum over k ascending, from +0, of the token's rows that were pushed;
/// dropped slots are left out. `first` and `step` say which vectors of the token this thread sums.
template <int kTopk>
__device__ __forceinline__ void reduce_token(const DeviceContext& ctx, std::int64_t token,
                                             std::int64_t first, std::int64_t step) {
  const PassView& v = ctx.view;
  const int topk = kTopk > 0 ? kTopk : v.topk;
  const std::int32_t* ids = v.topk_ids + token * topk;
  const std::int64_t vectors = v.hidden / kVectorElements;
  const auto* rows = reinterpret_cast<const Vector*>(ctx.at<bf16>(v.rank, ctx.symmetric.combine)) +
                     token * topk * vectors;
  auto* out = reinterpret_cast<Vector*>(ctx.token_out) + token * vectors;
  for (std::int64_t i = first; i < vectors; i += step) {
    float sum[kVectorElements] = {};
    if constexpr (kTopk > 0) {
      Vector loaded[kTopk];  // all in flight together
#pragma unroll
      for (int k = 0; k < kTopk; ++k) {
        if (ids[k] >= 0) loaded[k] = __ldcs(rows + k * vectors + i);
      }
#pragma unroll
      for (int k = 0; k < kTopk; ++k) {
        if (ids[k] >= 0) add_vector(sum, loaded[k]);
      }
    } else {
      for (int k = 0; k < topk; ++k) {
        if (ids[k] >= 0) add_vector(sum, __ldcs(rows + k * vectors + i));
      }
    }
    __stcs(out + i, Vector{pack_pair(sum[0], sum[1]), pack_pair(sum[2], sum[3]),
                           pack_pair(sum[4], sum[5]), pack_pair(sum[6], sum[7])});
  }
}

/// dprobs of a token, copied; 0 at dropped slots.
__device__ __forceinline__ void reduce_dprobs(const DeviceContext& ctx, std::int64_t token, int k) {
  const std::int64_t slot = token * ctx.view.topk + k;
  const float* pushed = ctx.at<float>(ctx.view.rank, ctx.symmetric.dprobs);
  ctx.dprobs_out[slot] = ctx.view.topk_ids[slot] < 0 ? 0.0f : pushed[slot];
}

}  // namespace uniep::cuda
