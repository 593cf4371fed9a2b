// The sigmoid of the epilogues has the bits of expf and an ordinary division wherever they use it;
// their erf has those of erff.
#include <gtest/gtest.h>

#include "base/cuda/driver.h"
#include "cuda/device_array.h"
#include "cuda/sigmoids.h"

namespace uniep::cuda::testing {
namespace {

TEST(CudaActivation, SigmoidOfEveryBf16HasTheBitsOfExpfAndADivision) {
  if (!device_problem(0).empty()) GTEST_SKIP() << device_problem(0);
  constexpr std::int64_t kCount = 65536;
  const DeviceArray<std::uint32_t> fast(kCount), divided(kCount), usual(kCount);
  check_cuda(uniep::testing::both_sigmoids(fast.data(), divided.data(), usual.data()),
             "compute sigmoids");
  const auto a = fast.to_host();
  const auto b = divided.to_host();
  const auto is_usual = usual.to_host();
  int compared = 0;
  for (std::size_t bits = 0; bits < a.size(); ++bits) {
    if (is_usual[bits] == 0) continue;
    ++compared;
    ASSERT_EQ(a[bits], b[bits]) << "z has the bits " << std::hex << bits;
  }
  // All but magnitudes above 86 and NaNs, of which there are 31 thousand.
  EXPECT_EQ(compared, 34138);
}

TEST(CudaActivation, ErfOfEveryFloatHasTheBitsOfErff) {
  if (!device_problem(0).empty()) GTEST_SKIP() << device_problem(0);
  const DeviceArray<std::uint32_t> differing(1);
  check_cuda(cudaMemset(differing.data(), 0, sizeof(std::uint32_t)), "count from 0");
  check_cuda(uniep::testing::count_differing_erfs(differing.data()), "compute erf");
  EXPECT_EQ(differing.to_host()[0], 0U);
}

}  // namespace
}  // namespace uniep::cuda::testing
