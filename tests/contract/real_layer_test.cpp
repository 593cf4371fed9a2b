// The real layer that ships with the project, over presets and ranks.
#include <gtest/gtest.h>

#include "contract/contract_testing.h"
#include "io/layer_file.h"
#include "support/expect_same.h"

namespace uniep::testing {
namespace {

const LayerData& trace() {
  static const LayerData data = io::load_layer(UNIEP_DATA_DIR "/moe_lm_layer.safetensors");
  return data;
}

class Trace : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Presets, Trace,
                         ::testing::Values("sequential", "pipelined:4", "two-kernel", "single"),
                         [](const auto& test) { return test_name(test.param); });

TEST_P(Trace, GivesTheContractsBitsOnAnyNumberOfRanks) {
  static const LayerResult want = reference::contract(trace());
  for (const int ranks : {1, 2, 4, 8}) {
    RunOptions o;
    o.token_begin = workload::even_parts(trace().tokens, ranks);
    o.forward_schedule = o.backward_schedule = parse_schedule(GetParam());
    expect_same_bits(run_layer(trace(), o), want, cat(ranks, " ranks"));
  }
}

}  // namespace
}  // namespace uniep::testing
