// Rows that take more than 2^32 bytes and have more than 2^31 elements: an index of 32 bits
// anywhere would show.
#include <gtest/gtest.h>

#include <cstring>

#include "base/check.h"
#include "base/cuda/driver.h"
#include "cuda/cuda_schedules.h"
#include "cuda/gpu_rank.h"
#include "group/cuda/cuda_communicator.h"
#include "reference/compare.h"
#include "reference/contract.h"
#include "support/random_case.h"

namespace uniep::cuda::testing {
namespace {

using uniep::testing::DeviceTensor;

/// The layer repeats these tokens over and over, so that all of its results are known from theirs.
/// 13 tokens are no divisor of 2^31 elements: what wraps lands in the middle of another row.
constexpr std::int64_t kPeriod = 13;
constexpr int kRepeats = 3156;
constexpr std::int64_t kTokens = kPeriod * kRepeats;

LayerData one_period() {
  uniep::testing::Rng rng(1);
  LayerData d;
  d.tokens = kPeriod;
  d.hidden = 7168;
  d.intermediate = 64;
  d.num_experts = 8;
  d.topk = 8;
  d.x = uniep::testing::random_bf16(rng, d.tokens * d.hidden, 1);
  d.dy = uniep::testing::random_bf16(rng, d.tokens * d.hidden, 1);
  d.w1 = uniep::testing::random_bf16(rng, d.num_experts * 2 * d.intermediate * d.hidden, 0.012f);
  d.w2 = uniep::testing::random_bf16(rng, d.num_experts * d.hidden * d.intermediate, 0.12f);
  for (std::int64_t i = 0; i < d.tokens * d.topk; ++i) {
    d.topk_ids.push_back(static_cast<std::int32_t>(i % d.num_experts));
    d.topk_probs.push_back(0.05f + 0.01f * static_cast<float>(i % 17));
  }
  return d;
}
static_assert(kTokens * 8 * 7168 > std::int64_t{1} << 31);

template <class T>
void repeat(std::vector<T>& tensor) {
  const std::vector<T> period = std::move(tensor);
  tensor = {};
  tensor.reserve(period.size() * kRepeats);
  for (int i = 0; i < kRepeats; ++i) tensor.insert(tensor.end(), period.begin(), period.end());
}

LayerData all_periods(LayerData d) {
  d.tokens = kTokens;
  repeat(d.x);
  repeat(d.dy);
  repeat(d.topk_ids);
  repeat(d.topk_probs);
  return d;
}

template <class T>
void expect_repeated(const std::vector<T>& got, const std::vector<T>& period, const char* tensor) {
  ASSERT_EQ(got.size(), period.size() * kRepeats);
  for (std::size_t i = 0; i < kRepeats; ++i) {
    const T* part = got.data() + i * period.size();
    ASSERT_EQ(std::memcmp(part, period.data(), period.size() * sizeof(T)), 0)
        << tensor << " differs in tokens " << i * kPeriod << " to " << (i + 1) * kPeriod - 1;
  }
}

/// The distance of `got` from `factor` times `want`.
template <class T>
void expect_close(const std::vector<T>& got, const std::vector<T>& want, double factor,
                  const char* tensor) {
  std::vector<double> wanted = reference::to_double(std::span<const T>(want));
  for (double& v : wanted) v *= factor;
  EXPECT_LT(reference::relative_l2(reference::to_double(std::span<const T>(got)), wanted), 1e-2)
      << tensor << ", times " << factor;
}

TEST(CudaLargeLayer, RowsBeyondTwoToThe31Elements) {
  if (!device_problem(0).empty()) GTEST_SKIP() << device_problem(0);
  std::size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "ask for free memory");
  if (free < std::size_t{40} << 30) GTEST_SKIP() << "needs 40 GiB of device memory";
  const LayerData period = one_period();
  const LayerResult want = reference::contract(period);
  const Schedule schedule = uniep::testing::cuda_schedules().back();
  const LayerResult small = uniep::testing::GpuRank(period, single_rank()).step(schedule);
  expect_close(small.out, want.out, 1, "out");
  expect_close(small.dx, want.dx, 1, "dx");
  expect_close(small.dprobs, want.dprobs, 1, "dprobs");
  const LayerData data = all_periods(period);
  const LayerResult got = uniep::testing::GpuRank(data, single_rank()).step(schedule);
  expect_repeated(got.out, small.out, "out");
  expect_repeated(got.dx, small.dx, "dx");
  expect_repeated(got.dprobs, small.dprobs, "dprobs");
  expect_close(got.dw1, want.dw1, kRepeats, "dw1");
  expect_close(got.dw2, want.dw2, kRepeats, "dw2");
}

}  // namespace
}  // namespace uniep::cuda::testing
