#include "cuda/add_rows.h"

#include "base/check.h"
#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"

namespace uniep::cuda {
namespace {

void require_aligned(const char* name, const bf16* rows) {
  constexpr std::uintptr_t kAlignment = 16;
  const auto address = reinterpret_cast<std::uintptr_t>(rows);
  require(address % kAlignment == 0, ErrorCode::kInvalidArgument, name, " starts at address ",
          address, "; with the cuda backend a multiple of ", kAlignment, " is accepted");
}

}  // namespace

void add_rows(const RowSums& sums, int device, cudaStream_t stream) {
  require_aligned("rows", sums.rows);
  require_aligned("more", sums.more);
  require_aligned("out", sums.out);
  if (sums.tokens == 0) return;
  const DeviceScope scope(device);
  check_cuda(launch_add_rows(sums, stream), "launch add_rows");
}

}  // namespace uniep::cuda
