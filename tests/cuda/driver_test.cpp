#include "base/cuda/driver.h"

#include <gtest/gtest.h>

#include "base/cuda/check_cuda.h"
#include "support/expect_error.h"
#include "support/scoped_env.h"
#include "uniep/communicator.h"

namespace uniep::testing {
namespace {

TEST(CudaDriver, SaysWhatIsMissing) {
  if (cuda::device_count() > 0) GTEST_SKIP() << "there is a CUDA device";
  const std::string problem = cuda::device_problem(0);
  EXPECT_NE(problem.find("compute capability 9.0"), std::string::npos) << problem;
  expect_error(ErrorCode::kUnsupported, problem, [] { cuda::require_device(0); });
  const ScopedEnv r("RANK", ""), w("WORLD_SIZE", ""), l("LOCAL_RANK", ""), a("MASTER_ADDR", ""),
      p("MASTER_PORT", "");
  expect_error(ErrorCode::kUnsupported, "rank 0: " + problem,
               [] { Communicator::cuda_from_environment(); });
}

TEST(CudaDriver, DevicesOutOfRangeAreNamed) {
  const int count = cuda::device_count();
  if (count == 0) GTEST_SKIP() << "no CUDA device";
  const std::string problem = cuda::device_problem(count);
  EXPECT_NE(problem.find("there is no CUDA device " + std::to_string(count)), std::string::npos)
      << problem;
}

TEST(CudaDriver, FindsTheTensorMapEncoder) {
  if (cuda::device_count() == 0) GTEST_SKIP() << "no CUDA device";
  EXPECT_EQ(cuda::device_problem(0), "");
  EXPECT_NE(cuda::tensor_map_encode_tiled(), nullptr);
  std::cout << cuda::device_text(0) << '\n';
}

TEST(CudaDriver, ErrorsNameTheCallAndTheReason) {
  expect_error(ErrorCode::kDevice, "cannot launch fc1: cudaErrorInvalidValue (invalid argument)",
               [] { cuda::check_cuda(cudaErrorInvalidValue, "launch fc1"); });
}

}  // namespace
}  // namespace uniep::testing
