// Rows of slots that are added up on a GPU.
#include <gtest/gtest.h>

#include "api/c_steps.h"
#include "cuda/device_array.h"
#include "support/cases.h"
#include "support/row_sums_case.h"

namespace uniep::cuda {
namespace {

template <class T>
DeviceArray<T> uploaded(const std::vector<T>& host) {
  return DeviceArray<T>(std::span<const T>(host));
}

TEST(CudaAddRows, TheSumsOfALayerThatAddsThemUp) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "needs a GPU";
  for (int seed = 0; seed < uniep::testing::cases(200); ++seed) {
    uniep::testing::Rng rng(static_cast<unsigned>(seed));
    const uniep::testing::RowSumsCase rows(rng);
    const auto first = uploaded(rows.rows), more = uploaded(rows.more);
    const auto row = uploaded(rows.row);
    const auto ids = uploaded(rows.layer.topk_ids);
    const auto factors = uploaded(rows.layer.topk_probs);
    const auto out = uploaded(std::vector(rows.sums.size(), bf16{0x7fff}));
    uniep_rows_call call = rows.call();
    call.backend = 1;
    call.rows = first.data(), call.more = more.data(), call.row = row.data();
    call.ids = ids.data(), call.out = out.data();
    if (call.factors != nullptr) call.factors = factors.data();
    ASSERT_EQ(uniep_add_rows(&call), 0) << uniep_last_error();
    uniep::testing::expect_same_bits(out.to_host(), rows.sums, "sums", cat("seed ", seed));
  }
}

TEST(CudaAddRows, OfARowThatThereIsNotNaN) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "needs a GPU";
  const auto rows = uploaded(std::vector<bf16>(8, to_bf16(1)));
  const auto ids = uploaded(std::vector<std::int32_t>{0, 0, 0, -1});
  const auto row = uploaded(std::vector<std::int64_t>{0, 2, 0, INT64_MIN});
  const DeviceArray<bf16> out(16);
  uniep_rows_call call{};
  call.backend = 1;
  call.tokens = 2, call.hidden = 8, call.topk = 2, call.num_experts = call.combine_groups = 1;
  call.ids = ids.data(), call.row = row.data(), call.rows = rows.data(), call.num_rows = 1;
  call.more = rows.data(), call.num_more = 1;
  call.out = out.data();
  ASSERT_EQ(uniep_add_rows(&call), 0) << uniep_last_error();
  const std::vector<bf16> sums = out.to_host();
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_TRUE(std::isnan(to_float(sums[i])));
    EXPECT_EQ(sums[8 + i], to_bf16(1));
  }
}

}  // namespace
}  // namespace uniep::cuda
