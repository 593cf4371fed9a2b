#pragma once

#include "cuda/pass_kernels.h"

namespace uniep::cuda {

/// Eight equal elements at a time: rows have whole multiples of them, at multiples of 16 bytes.
__device__ __forceinline__ void fill_rows(bf16* rows, std::int64_t count, bf16 value,
                                          std::int64_t thread, std::int64_t threads) {
  if (rows == nullptr) return;
  const std::uint32_t pair = std::uint32_t{value.bits} << 16 | value.bits;
  auto* to = reinterpret_cast<uint4*>(rows);
  for (std::int64_t i = thread; i < count / 8; i += threads) to[i] = {pair, pair, pair, pair};
}

/// Fills all of it by `threads` threads, each with its number.
__device__ __forceinline__ void fill_of_fault(const FaultFill& f, std::int64_t thread,
                                              std::int64_t threads) {
  fill_rows(f.tokens, f.tokens_count, kFaultToken, thread, threads);
  for (const auto& grad : f.weight_grads) {
    fill_rows(grad.data, grad.count, bf16{}, thread, threads);
  }
  for (const auto& dprobs : f.dprobs) {
    if (dprobs.data == nullptr) continue;
    for (std::int64_t i = thread; i < dprobs.count; i += threads) dprobs.data[i] = 0;
  }
}

}  // namespace uniep::cuda
