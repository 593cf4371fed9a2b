// The whole of a small grid rather than samples: every preset, tile shape and number of workers on
// one layer whose sizes no tile divides.
#include <gtest/gtest.h>

#include "contract/contract_testing.h"
#include "support/cases.h"
#include "support/expect_same.h"
#include "support/random_case.h"

namespace uniep::testing {
namespace {

/// H = 200 and I = 136: several tiles of 64 columns, one of 256, and always a remainder. Experts
/// with rows for several tiles of 16, with few, and with none.
LayerData odd_layer() {
  Rng rng(5);
  LayerData d;
  d.tokens = 61;
  d.hidden = 200;
  d.intermediate = 136;
  d.num_experts = 8;
  d.topk = 3;
  d.x = random_bf16(rng, d.tokens * d.hidden, 1);
  d.dy = random_bf16(rng, d.tokens * d.hidden, 1);
  d.w1 = random_bf16(rng, d.num_experts * 2 * d.intermediate * d.hidden, 0.1f);
  d.w2 = random_bf16(rng, d.num_experts * d.hidden * d.intermediate, 0.1f);
  for (std::int64_t i = 0; i < d.tokens * d.topk; ++i) {
    const std::int64_t draw = pick(rng, 0, 99);
    const std::int64_t expert = draw < 5 ? -1 : draw < 45 ? 2 : draw < 70 ? 7 : pick(rng, 0, 5);
    d.topk_ids.push_back(static_cast<std::int32_t>(expert));
    d.topk_probs.push_back(0.01f * static_cast<float>(pick(rng, 1, 99)));
  }
  return d;
}

class Grid : public ::testing::TestWithParam<std::tuple<const char*, int>> {};

INSTANTIATE_TEST_SUITE_P(PresetsAndRanks, Grid,
                         ::testing::Combine(::testing::Values("sequential", "pipelined:2",
                                                              "pipelined:5", "two-kernel",
                                                              "single"),
                                            ::testing::Values(1, 2, 4, 8)),
                         [](const auto& test) {
                           return cat(test_name(std::get<0>(test.param)), "_",
                                      std::get<1>(test.param));
                         });

TEST_P(Grid, EveryTileShapeAndNumberOfWorkers) {
  static const LayerData data = odd_layer();
  static const LayerResult want = reference::contract(data);
  const auto& [preset, ranks] = GetParam();
  int point = 0;
  for (const int tile_m : {16, 32, 64, 128}) {
    for (const int tile_n : {64, 128, 256}) {
      for (const int workers : {1, 2, 3}) {
        if (point++ % std::max(1, 36 / cases(36)) != 0) continue;
        Schedule s = parse_schedule(preset);
        s.tile_m = tile_m;
        s.tile_n = tile_n;
        s.workers = workers;
        RunOptions o;
        o.token_begin = workload::even_parts(data.tokens, ranks);
        o.forward_schedule = o.backward_schedule = s;
        expect_same_bits(run_layer(data, o), want, to_string(s));
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace uniep::testing
