// What a CPU is measured with.
#include "profile/measure_profile.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "workload/synthetic.h"

namespace uniep::tool {
namespace {

// Weight gradients are sums over the rows of an expert. Over few rows alone, a fit cannot tell what
// is multiplied from what is packed, and the speed over many is chance.
TEST(ProfileShapes, HaveFewAndManyRowsAnExpert) {
  double fewest = std::numeric_limits<double>::infinity(), most = 0;
  for (const char* text : profile_shapes()) {
    const workload::ShapeSpec spec = workload::parse_shape(text);
    const double rows = static_cast<double>(spec.tokens) * spec.topk / spec.num_experts;
    fewest = std::min(fewest, rows);
    most = std::max(most, rows);
  }
  EXPECT_LE(fewest, 128);
  EXPECT_GE(most, 1024);
}

}  // namespace
}  // namespace uniep::tool
