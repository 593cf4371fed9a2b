#pragma once

#include <cuda_runtime_api.h>

namespace uniep::testing {

/// Takes an SM, all of whose threads wait until `*let_go` is not 0; at most `limit_ns`.
cudaError_t hold_an_sm(const volatile int* let_go, long long limit_ns, cudaStream_t stream);

}  // namespace uniep::testing
