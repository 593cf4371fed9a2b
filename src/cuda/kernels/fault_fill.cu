#include "cuda/device/fault_fill.cuh"
#include "cuda/kernels/start_kernel.h"

namespace uniep::cuda {
namespace {

constexpr int kFillThreads = 256;

__global__ void __launch_bounds__(kFillThreads)
    fault_fill_kernel(const PlanStatus* plan, const __grid_constant__ FaultFill fill) {
  if (plan->fault.kind == RoutingFault::Kind::kNone) return;
  fill_of_fault(fill, std::int64_t{blockIdx.x} * kFillThreads + threadIdx.x,
                std::int64_t{gridDim.x} * kFillThreads);
}

}  // namespace

cudaError_t prepare_fault_fill() { return load_kernel(fault_fill_kernel); }

cudaError_t launch_fault_fill(const PlanStatus* plan, const FaultFill& fill, int ctas,
                              cudaStream_t stream) {
  return launch_kernel(fault_fill_kernel, {.ctas = ctas, .threads = kFillThreads}, stream, plan,
                       fill);
}

}  // namespace uniep::cuda
