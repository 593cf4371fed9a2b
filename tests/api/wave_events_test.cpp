// Events of tokens that come in waves: who may give them, and how many.
#include <gtest/gtest.h>

#include "base/check.h"
#include "layer/arguments.h"
#include "support/expect_error.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

TEST(WaveEvents, AreAsManyAsThereAreWaves) {
  check_wave_events({}, 0);
  check_wave_events({}, 3);
  check_wave_events({.before = {nullptr, nullptr, nullptr}}, 3);
  check_wave_events({.after = {nullptr, nullptr, nullptr}}, 3);
  expect_invalid("waves.before has 2 events; none, or 3 of this pass is accepted", [] {
    check_wave_events({.before = {nullptr, nullptr}}, 3);
  });
  expect_invalid("waves.after has 1 events; none of this pass is accepted",
                 [] { check_wave_events({.after = {nullptr}}, 0); });
}

TEST(WaveEvents, AreNoneOnTheCpu) {
  LayerGroup g(plain_layer(1), 1);
  Problem problem = g.split().problem();
  problem.gathered_hosts = 2;
  problem.first_host = 1;
  Layer layer(problem, g.group()[0]);
  const RoutingPlan plan = layer.plan(g.split().topk_ids(0));
  const auto schedule = layer.schedule(Pass::kForward);
  expect_invalid("rank 0: waves.before has 3 events; none of this pass is accepted", [&] {
    (void)layer.forward(plan, g.forward_args(0),
                        {.schedule = schedule, .waves = {.before = {nullptr, nullptr, nullptr}}});
  });
  Saved saved = layer.forward(plan, g.forward_args(0));
  const CallOptions two{.waves = {.after = {nullptr, nullptr}}};
  const std::string refused = "rank 0: waves.after has 2 events; none of this pass is accepted";
  expect_invalid(refused, [&] { layer.backward(saved, g.backward_args(0), two); });
  expect_invalid(refused, [&] { layer.backward_data(saved, data_args(g.backward_args(0)), two); });
  layer.backward_data(saved, data_args(g.backward_args(0)));
  expect_invalid("waves.after has 2 events; none of this pass is accepted",  // not collective
                 [&] { layer.backward_weights(saved, weights_args(g.backward_args(0)), two); });
  layer.backward_weights(saved, weights_args(g.backward_args(0)));
  expect_same_bits(g.result(), reference::contract(g.data()), "with waves");
}

TEST(GatheredHosts, AreNotThoseOfAGroupOverHosts) {
  LayerGroup g(plain_layer(2), 2);
  run_ranks(Communicator::cpu_group(2, 2), [&](Communicator& c) {
    Problem problem = g.split().problem();
    problem.gathered_hosts = 2;
    try {
      const Layer layer(problem, c);
      ADD_FAILURE() << "it was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
      EXPECT_NE(std::string(e.what()).find("problem.gathered_hosts is 2 in a group of 2 hosts"),
                std::string::npos)
          << e.what();
    }
  });
}

}  // namespace
}  // namespace uniep::testing
