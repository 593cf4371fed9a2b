#include "cuda/kernels/pass_kernel.cuh"

namespace uniep::cuda {

template struct PassKernel<PassVariant{
    .pass = Pass::kBackward, .bf16_main = true, .tile_n = 128, .general = true}>;

}  // namespace uniep::cuda
