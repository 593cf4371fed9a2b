#include "uniep/communicator.h"

#include "base/check.h"
#ifdef UNIEP_HAS_CUDA
#include "cuda/cuda_communicator.h"
#endif

namespace uniep {

Communicator Communicator::cuda_from_environment() {
#ifdef UNIEP_HAS_CUDA
  return Communicator(cuda::communicator_from_environment());
#else
  throw Error(ErrorCode::kUnsupported,
              "this build of uniep has no CUDA backend; one configured with -DUNIEP_CUDA=ON has");
#endif
}

}  // namespace uniep
