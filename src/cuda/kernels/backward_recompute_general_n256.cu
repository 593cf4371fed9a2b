#include "cuda/kernels/pass_kernel.cuh"

namespace uniep::cuda {

template struct PassKernel<PassVariant{
    .pass = Pass::kBackward, .recomputes = true, .tile_n = 256, .general = true}>;

}  // namespace uniep::cuda
