#pragma once

#include <cuda_runtime.h>

namespace uniep::cuda {

// fp32, every product and sum rounded on its own (the translation units are compiled with
// -fmad=false), exp and division as accurate as the CUDA math library's.

__device__ __forceinline__ float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }
__device__ __forceinline__ float silu(float z, float s) { return z * s; }
__device__ __forceinline__ float silu_grad(float z, float s) { return s * (1.0f + z * (1.0f - s)); }

}  // namespace uniep::cuda
