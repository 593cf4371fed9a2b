// The C API: searches for a schedule.
#include <gtest/gtest.h>

#include "api/c_steps.h"
#include "support/tuned_cache.h"

namespace uniep::testing {
namespace {

TEST(CApi, FindsASchedule) {
  const TunedCache cache;
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(0));
  const uniep_tune_config config = short_search();
  const uniep_forward_call forward = step.forward_call();
  uniep_tune_result found{};
  expect_ok(uniep_tune_forward(layer.get(), &forward, &config, &found));
  const uniep_backward_call backward = step.backward_call();
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    if (pass == Pass::kBackward) {
      expect_ok(uniep_tune_backward(layer.get(), &backward, &config, &found));
    }
    EXPECT_GT(found.seconds, 0);
    EXPECT_GT(found.default_seconds, 0);
    EXPECT_GE(found.candidates, 6);
    EXPECT_EQ(found.rejected, 0);
    EXPECT_EQ(found.stopped, 0);
    EXPECT_EQ(found.stored, 1);
    EXPECT_STRNE(found.why, "");
    EXPECT_STREQ(found.problem, "");
    const Layer later(layer.problem(), Communicator::cpu_group(1)[0]);
    EXPECT_EQ(to_string(later.schedule(pass)), found.schedule);
  }
  step.expect_contract("after the searches");
}

TEST(CApi, ASearchIsStoppedAndRefused) {
  const TunedCache cache;
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(0));
  const uniep_forward_call forward = step.forward_call();
  uniep_tune_result found{};
  uniep_tune_config config = short_search();
  int asked = 0;
  config.stop_context = &asked;
  config.stop = [](void* count) { return ++*static_cast<int*>(count) == 3 ? 7 : 0; };
  expect_ok(uniep_tune_forward(layer.get(), &forward, &config, &found));
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(found.stopped, 1);
  EXPECT_EQ(found.stored, 0);

  config = short_search();
  config.stop = [](void*) -> int { throw 42; };
  expect_refused(uniep_tune_forward(layer.get(), &forward, &config, &found),
                 "rank 0: an exception of an unknown type", ErrorCode::kInternal);

  config = short_search();
  config.budget_s = -1;
  expect_refused(uniep_tune_forward(layer.get(), &forward, &config, &found),
                 "rank 0: options.budget_s is -1; 0.1 to 86400 is accepted");
  config = short_search();
  config.not_stored = 2;
  expect_refused(uniep_tune_forward(layer.get(), &forward, &config, &found),
                 "rank 0: not_stored is 2; 0 and 1 are accepted");
  expect_refused(uniep_tune_forward(layer.get(), &forward, &config, nullptr),
                 "rank 0: result is NULL; an address is accepted");
  step.forward();
  const uniep_backward_call part = step.backward_call(1);
  expect_refused(uniep_tune_backward(layer.get(), &part, nullptr, &found),
                 "rank 0: part is 1; 0 (whole) is accepted by a search");
  step.backward();
  step.expect_contract("after all these");
}

}  // namespace
}  // namespace uniep::testing
