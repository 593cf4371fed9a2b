// Maps of experts' matrices that lie apart: the host has encoded one, the others differ from it by
// their address.
#include "cuda/device/fault_fill.cuh"
#include "cuda/kernels/start_kernel.h"
#include "cuda/ptx/tma.cuh"

namespace uniep::cuda {
namespace {

constexpr int kMapThreads = 128;

/// A CTA for each map.
__global__ void __launch_bounds__(kMapThreads)
    expert_maps_kernel(const __grid_constant__ ExpertMapsArgs args) {
  const int index = static_cast<int>(blockIdx.x);
  if (threadIdx.x == 0) {
    args.to[index] = args.first;
    ptx::set_tensor_map_address(args.to + index, args.begins[index]);
    ptx::release_tensor_maps();
  }
  if (args.cleared == nullptr || args.cleared->fault.kind == RoutingFault::Kind::kNone) return;
  fill_rows(static_cast<bf16*>(args.begins[index]), args.elements, bf16{},
            static_cast<std::int64_t>(threadIdx.x), kMapThreads);
}

}  // namespace

cudaError_t prepare_expert_maps() { return load_kernel(expert_maps_kernel); }

cudaError_t launch_expert_maps(const ExpertMapsArgs& args, cudaStream_t stream) {
  return launch_kernel(expert_maps_kernel, {.ctas = args.count, .threads = kMapThreads}, stream,
                       args);
}

}  // namespace uniep::cuda
