#include "tune/search/starting_points.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tune/gpu_layer.h"

namespace uniep::tune {
namespace {

using testing::key_of;
using testing::kGpu;
using testing::kGpuLayer;

TEST(StartingPoints, HaveTheDefaultFirstAndWhatAutoWouldTake) {
  const TuneKey key = key_of(1);
  const MachineProfile h200 = shipped_profile("h200");
  Space space(kGpuLayer, key.pass, kGpu);
  const Schedule pick = space.canonical(quick_pick(kGpuLayer, key, kGpu, h200));
  const auto presets = starting_points(space, kGpuLayer, key, kGpu, nullptr);
  EXPECT_EQ(presets.front(), space.canonical(default_schedule(Backend::kCuda)));
  EXPECT_EQ(std::ranges::count(presets, pick), 0);
  const auto all = starting_points(space, kGpuLayer, key, kGpu, &h200);
  EXPECT_EQ(all.front(), presets.front());
  EXPECT_EQ(all.size(), presets.size() + 1);
  EXPECT_EQ(std::ranges::count(all, pick), 1);
  // A search may be told to leave it out.
  space.restrict_to("launch=separate");
  EXPECT_EQ(std::ranges::count(starting_points(space, kGpuLayer, key, kGpu, &h200), pick), 0);
}

}  // namespace
}  // namespace uniep::tune
