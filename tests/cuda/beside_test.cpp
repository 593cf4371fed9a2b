// What runs beside other work of the GPU: weight gradients, which wait for nobody, take the SMs
// that are left. A pass that moves data needs all that it was given, and begins when they are free.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "base/check.h"
#include "base/cuda/driver.h"
#include "cuda/cuda_schedules.h"
#include "cuda/gpu_rank.h"
#include "cuda/graph.h"
#include "cuda/held_sm.h"
#include "group/cuda/cuda_communicator.h"
#include "support/expect_error.h"
#include "support/scoped_env.h"
#include "workload/synthetic.h"

namespace uniep::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// While it lives, an SM is held.
class HeldSm {
 public:
  HeldSm() {
    void* flag = nullptr;
    cuda::check_cuda(cudaHostAlloc(&flag, sizeof(int), cudaHostAllocMapped), "a flag");
    let_go_ = static_cast<int*>(flag);
    *let_go_ = 0;
    cuda::check_cuda(hold_an_sm(let_go_, 20'000'000'000, stream_.get()), "hold an SM");
  }
  ~HeldSm() {
    let_go();
    cudaStreamSynchronize(stream_.get());
    cudaFreeHost(const_cast<int*>(let_go_));
  }
  void let_go() { *let_go_ = 1; }
  bool is_held() const { return cudaStreamQuery(stream_.get()) == cudaErrorNotReady; }

 private:
  const Stream stream_;
  volatile int* let_go_ = nullptr;
};

/// Whether the stream has done all that is on it, within a limit.
bool is_done(const Stream& stream, milliseconds limit) {
  const auto end = steady_clock::now() + limit;
  while (cudaStreamQuery(stream.get()) == cudaErrorNotReady) {
    if (steady_clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

class CudaBeside : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::device_problem(0).empty()) GTEST_SKIP() << cuda::device_problem(0);
  }

  const LayerData data_ = workload::make_layer(
      workload::parse_shape("custom,tokens=700,hidden=264,intermediate=136,experts=6,topk=3"), 1, 1,
      0.5);
};

/// What the rank has when `calls` are done, which end while an SM is held.
template <class Calls>
LayerResult beside_held_sm(GpuRank& rank, const Stream& stream, Calls&& calls) {
  HeldSm held;
  calls();
  EXPECT_TRUE(is_done(stream, milliseconds(5000)));
  EXPECT_TRUE(held.is_held());
  held.let_go();
  return rank.result();
}

void expect_same(const LayerResult& found, const LayerResult& wanted) {
  EXPECT_EQ(found.out, wanted.out);
  EXPECT_EQ(found.dx, wanted.dx);
  EXPECT_EQ(found.dw1, wanted.dw1);
  EXPECT_EQ(found.dw2, wanted.dw2);
}

TEST_F(CudaBeside, WeightGradientsTakeTheSmsThatAreLeft) {
  const Stream stream;
  GpuRank rank(data_, cuda::single_rank(), {.cuda_stream = stream.get()});
  for (const Schedule& schedule : cuda_schedules()) {
    SCOPED_TRACE(to_string(schedule));
    const LayerResult wanted = rank.step(schedule);
    rank.forget_results();
    rank.plan();
    rank.forward(schedule);
    rank.backward_data(schedule);
    ASSERT_TRUE(is_done(stream, milliseconds(10000)));
    expect_same(beside_held_sm(rank, stream, [&] { rank.backward_weights(schedule); }), wanted);
  }
}

TEST_F(CudaBeside, SpareSmsAreLeft) {
  const Stream stream;
  const ScopedEnv spare("UNIEP_SPARE_SMS", "1");
  GpuRank rank(data_, cuda::single_rank(), {.cuda_stream = stream.get()});
  for (const Schedule& schedule : cuda_schedules()) {
    SCOPED_TRACE(to_string(schedule));
    const LayerResult wanted = rank.step(schedule);
    rank.forget_results();
    const auto step = [&] {
      rank.plan();
      rank.forward(schedule);
      rank.backward_data(schedule);
      rank.backward_weights(schedule);
    };
    expect_same(beside_held_sm(rank, stream, step), wanted);
  }
}

TEST_F(CudaBeside, ASchedulesWorkersMustFitBesideSpareSms) {
  const ScopedEnv spare("UNIEP_SPARE_SMS", "16");
  GpuRank rank(data_, cuda::single_rank(), {});
  Schedule schedule = cuda_schedules()[0];
  schedule.workers = cuda::sms_to_hold(0);
  rank.step(schedule);
  ++schedule.workers;
  rank.plan();
  expect_error(
      ErrorCode::kUnsupported,
      cat("rank 0: the schedule has workers=", schedule.workers, "; this device accepts 0 to ",
          schedule.workers - 1, ", the SMs that a pass may hold"),
      [&] { rank.forward(schedule); });
}

TEST_F(CudaBeside, SpareSmsThatLeaveNoneAreRefused) {
  const ScopedEnv spare("UNIEP_SPARE_SMS", "65");
  expect_invalid(
      "rank 0: environment variable UNIEP_SPARE_SMS is '65'; an integer from 0 to 64 is accepted",
      [&] { GpuRank(data_, cuda::single_rank(), {}); });
}

/// So the SM is held indeed.
TEST_F(CudaBeside, APassThatMovesDataWaitsForItsSms) {
  const Stream stream;
  GpuRank rank(data_, cuda::single_rank(), {.cuda_stream = stream.get()});
  rank.step(cuda_schedules()[0]);
  HeldSm held;
  rank.plan();
  rank.forward(cuda_schedules()[0]);
  EXPECT_FALSE(is_done(stream, milliseconds(300)));
  EXPECT_TRUE(held.is_held());
  held.let_go();
  EXPECT_TRUE(is_done(stream, milliseconds(10000)));
}

}  // namespace
}  // namespace uniep::testing
