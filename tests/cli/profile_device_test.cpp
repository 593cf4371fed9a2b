// A GPU's profile, from little time: figures that make sense, and a layer that was not measured
// predicted by them.
#include <gtest/gtest.h>

#include <cmath>

#include "base/check.h"
#include "base/cuda/driver.h"
#include "group/cuda/cuda_communicator.h"
#include "profile/device_lab.h"
#include "profile/measure_cuda_profile.h"
#include "tune/model/simulation.h"

namespace uniep::tool {
namespace {

constexpr const char* kLayer = "custom,tokens=4096,hidden=3072,intermediate=1024,experts=8,topk=2";

class CudaProfile : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string problem = cuda::device_problem(0);
    if (!problem.empty()) GTEST_SKIP() << problem;
  }
};

TEST_F(CudaProfile, PredictsALayerThatWasNotMeasured) {
  const auto device = cuda_bench_device();
  tune::LabOptions options;
  options.repeats = 2;
  const tune::MeasuredProfile measured =
      measure_cuda_profile(cuda::single_rank(), *device, options, tune::shipped_profile("h200"));
  const tune::MachineProfile& p = measured.profile;
  EXPECT_EQ(p.gemms.size(), 12u);
  for (const tune::GemmCost& c : p.gemms) {
    EXPECT_GE(c.per_mnk, 0);
    EXPECT_GE(c.per_mn, 0);
    // 2.6e-13 is what a Hopper GPU could do at best.
    const double seconds = 128.0 * c.tile_n * (c.per_mnk * 4096 + c.per_mn);
    EXPECT_GT(seconds, 128.0 * c.tile_n * 4096 * 2.4e-13) << name(c.stage);
    EXPECT_LT(seconds, 128.0 * c.tile_n * 4096 * 2e-12) << name(c.stage);
  }
  EXPECT_GE(p.padding, 0);
  EXPECT_LE(p.padding, 1);
  EXPECT_GE(p.cache_bytes, 4e7) << "a Hopper GPU's L2";
  // Of all SMs, bytes per second that reduce reads and writes: HBM3's, not the cache's.
  EXPECT_LT(p.workers / p.reduce.per_byte, 5e12);
  EXPECT_GT(p.workers / p.reduce.per_byte, 2e12);
  EXPECT_LT(p.enter.fixed, 1e-3);
  EXPECT_LT(p.launch_s, 1e-3);
  EXPECT_EQ(tune::profile_from_json(tune::profile_to_json(p), "a test").gemms, p.gemms);

  DeviceLab lab(cuda::single_rank(), cuda::single_rank(), *device);
  lab.set_up(kLayer, false);
  const BenchCase bench = make_case(kLayer, 1, 0, 0);
  const std::vector<std::int64_t> tokens = {bench.spec.tokens};
  const std::vector<RoutingPlan> plans = {
      RoutingPlan::build(bench.problem, 0, tokens, bench.routing.topk_ids)};
  for (const char* preset : {"sequential", "single"}) {
    const Schedule schedule = parse_schedule(preset, default_schedule(Backend::kCuda));
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      const double took = lab.run(pass, schedule, 20).elapsed_s;
      const double predicted = tune::simulate(plans, pass, schedule, p).seconds;
      RecordProperty(cat(preset, "_", name(pass), "_percent"),
                     static_cast<int>(std::lround(100 * predicted / took)));
      EXPECT_LT(predicted, 1.5 * took) << preset << ' ' << name(pass);
      EXPECT_GT(predicted, took / 1.5) << preset << ' ' << name(pass);
    }
  }
}

}  // namespace
}  // namespace uniep::tool
