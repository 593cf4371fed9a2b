#include "cuda/kernels/pass_kernel.cuh"

namespace uniep::cuda {

template struct PassKernel<PassVariant{.pass = Pass::kBackward, .recomputes = true, .tile_n = 128}>;

}  // namespace uniep::cuda
