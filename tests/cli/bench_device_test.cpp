// What `uniep bench` does on a GPU besides passes.
#include "bench/bench_device.h"

#include <gtest/gtest.h>

#include "base/cuda/driver.h"

namespace uniep::tool {
namespace {

class CudaBench : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string problem = cuda::device_problem(0);
    if (!problem.empty()) GTEST_SKIP() << problem;
  }

  template <class T>
  std::vector<T> to_host(const BenchTensor<T>& tensor) {
    std::vector<T> values(tensor.span().size());
    device_.download(values.data(), tensor.bytes());
    return values;
  }

  const std::unique_ptr<BenchDevice> owner_ = cuda_bench_device();
  BenchDevice& device_ = *owner_;
};

TEST_F(CudaBench, FillsWithTheHostsNumbers) {
  constexpr std::size_t kCount = 3'000'001;
  constexpr std::uint64_t kFirst = std::uint64_t{1} << 33;  // beyond 32 bits
  const auto spec = workload::parse_shape("small");
  for (const workload::Tensor which : {workload::Tensor::kX, workload::Tensor::kW1}) {
    const workload::Numbers numbers = workload::numbers_of(which, spec, 7);
    const BenchTensor<bf16> tensor(device_, kCount);
    device_.fill(tensor.span(), numbers, kFirst);
    std::vector<bf16> want(kCount);
    numbers.stream.fill(kFirst, want, numbers.scale);
    EXPECT_EQ(to_host(tensor), want);
  }
}

TEST_F(CudaBench, CountsWhatDiffersInABit) {
  std::vector<float> values(100'003, 1.5f);
  const BenchTensor<float> a(device_, 100'003), b(device_, 100'003);
  device_.upload(a.bytes(), values.data());
  for (const std::size_t i : {0u, 5u, 100'002u}) values[i] = -1.5f;
  device_.upload(b.bytes(), values.data());
  EXPECT_EQ(device_.count_differing(a.bytes(), b.bytes(), 4), 3);
  EXPECT_EQ(device_.count_differing(a.bytes(), b.bytes(), 2), 3) << "a sign is in one half";
  device_.poison(a.bytes());
  EXPECT_EQ(device_.count_differing(a.bytes(), b.bytes(), 4), 100'003);
  EXPECT_EQ(device_.count_differing(a.bytes().first(0), b.bytes().first(0), 4), 0);
}

TEST_F(CudaBench, TimesEveryGemmOfADirection) {
  const BenchCase bench = make_case("small", 1, 0, 0);
  const std::int64_t weights = 16 * 256 * 128;
  const BenchTensor<bf16> w1(device_, 2 * weights), w2(device_, weights);
  const auto seconds = device_.gemm_seconds(bench, 0, {}, w1.span(), w2.span());
  if (!seconds) GTEST_SKIP() << device_.no_gemms_reason();
  for (int i = 0; i < kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    const bool is_gemm = stage == Stage::kFc1 || stage == Stage::kFc2 || stage == Stage::kDfc2 ||
                         stage == Stage::kDfc1 || stage == Stage::kWgrad2 ||
                         stage == Stage::kWgrad1;
    EXPECT_EQ((*seconds)[static_cast<std::size_t>(i)] > 0, is_gemm) << name(stage);
  }
}

}  // namespace
}  // namespace uniep::tool
