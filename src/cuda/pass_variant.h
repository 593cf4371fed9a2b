#pragma once

#include <cuda_runtime.h>

#include "cuda/device/context.cuh"
#include "cuda/stage_maps.h"

namespace uniep::cuda {

/// What a kernel of passes is compiled for.
struct PassVariant {
  Pass pass = Pass::kForward;
  bool recomputes = false;  // what forward has not kept, or in a ring of rows
  bool bf16_main = false;   // main gradients are bf16; else fp32, or weight gradients overwritten
  int tile_n = 0;
  // For other experts than plain ones, or weights or gradients [in, out]; it can do all of the
  // rest.
  bool general = false;

  friend constexpr bool operator==(const PassVariant&, const PassVariant&) = default;
};

/// Runs the tasks of queues on `ctas` persistent CTAs. Each variant is compiled in a file of its
/// own in kernels/, since one takes half a minute. `prepare`: as those of pass_kernels.h.
template <PassVariant kVariant>
struct PassKernel {
  static cudaError_t prepare();
  static cudaError_t launch(const DeviceContext& ctx, const LaunchQueues& queues,
                            const PassMaps& maps, int ctas, cudaStream_t stream);
};

/// What PassKernel has, of a variant that is known at run time.
struct PassFunctions {
  PassVariant variant;
  cudaError_t (*prepare)();
  cudaError_t (*launch)(const DeviceContext&, const LaunchQueues&, const PassMaps&, int,
                        cudaStream_t);
};

/// The functions of any variant with a tile_n of kTileColumns; another is an internal error.
const PassFunctions& functions_for(const PassVariant& variant);

/// Prepares all variants.
cudaError_t prepare_passes();

}  // namespace uniep::cuda
