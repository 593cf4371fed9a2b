#include "cuda/device/order.cuh"
#include "cuda/kernels/resident.h"
#include "cuda/ptx/sync.cuh"

namespace uniep::cuda {
namespace {

/// Half of an SM's registers are left to `enter`, which copies meanwhile.
template <bool kTokenWaves>
__global__ void __launch_bounds__(kOrderThreads, 2)
    order_kernel(const __grid_constant__ OrderArgs args) {
  __shared__ OrderCta cta;
  ptx::let_next_launch_begin();
  OrderRoutine<kTokenWaves>(args, cta).run();
}

}  // namespace

cudaError_t prepare_order() {
  const cudaError_t e = load_kernel(order_kernel<false>);
  return e == cudaSuccess ? load_kernel(order_kernel<true>) : e;
}

cudaError_t launch_order(const OrderArgs& args, int ctas, cudaStream_t stream) {
  const auto kernel = args.view.comes_in_waves() ? order_kernel<true> : order_kernel<false>;
  return launch_resident(kernel, args, kOrderThreads, 0, ctas, stream);
}

}  // namespace uniep::cuda
