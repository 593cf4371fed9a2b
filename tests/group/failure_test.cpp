// Waits never hang. Ranks that stop, and signals that never come: who says what, and what is left.
#include <gtest/gtest.h>

#include <thread>

#include "base/check.h"
#include "layer/arguments.h"
#include "support/cases.h"
#include "support/layer_group.h"
#include "support/new_threads.h"
#include "support/scoped_env.h"
#include "support/states.h"

namespace uniep::testing {
namespace {

constexpr double kSlackSeconds = 3;
constexpr int kLongLimitMs = 60000;

void expect_all_failed(const std::vector<Outcome>& outcomes, double limit_s) {
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    ASSERT_TRUE(outcomes[r].error) << "rank " << r << " saw no error";
    const ErrorCode code = outcomes[r].error->code();
    EXPECT_TRUE(code == ErrorCode::kTimeout || code == ErrorCode::kPeerFailed)
        << outcomes[r].what();
    EXPECT_EQ(code == ErrorCode::kTimeout, outcomes[r].error->wait().has_value());
    EXPECT_LT(outcomes[r].seconds, limit_s + kSlackSeconds) << outcomes[r].what();
  }
}

/// What others are told of a failure: which rank it was, and that rank's own sentence.
void expect_repeats(const std::string& said, int origin, const std::string& sentence) {
  EXPECT_STATES(said, cat("the group is unusable since rank ", origin, " failed: ", sentence));
  EXPECT_TRUE(said.ends_with(sentence)) << said;
}

/// Later calls of any kind repeat the first failure, at once, with the same words everywhere.
void expect_unusable(LayerGroup& g, int origin, const std::string& sentence) {
  const std::function<void(int)> calls[] = {
      [&](int rank) { g.layer(rank).plan(g.split().topk_ids(rank)); },
      [&](int rank) { g.layer(rank).forward(g.plan(rank), g.forward_args(rank)); },
      [&](int rank) { g.layer(rank).backward(g.saved(rank), g.backward_args(rank)); },
      [&](int rank) {
        g.layer(rank).backward_data(g.saved(rank), data_args(g.backward_args(rank)));
      },
      [&](int rank) {
        g.layer(rank).backward_weights(g.saved(rank), weights_args(g.backward_args(rank)));
      },
      [&](int rank) { g.layer(rank).synchronize(); },
      [&](int rank) {
        const Layer another(g.split().problem(), g.group()[static_cast<std::size_t>(rank)]);
      }};
  for (const auto& call : calls) {
    for (const Outcome& o : g.attempt(call)) {
      expect_repeats(o.what(), origin, sentence);
      EXPECT_LT(o.seconds, 1.0);
    }
  }
}

/// The rank whose wait expired first; the latch keeps its sentence.
int origin_of(const std::vector<Outcome>& outcomes) {
  for (const Outcome& o : outcomes) {
    if (!o.error || o.error->code() != ErrorCode::kPeerFailed) continue;
    const std::size_t at = o.what().find("rank ");
    if (at != std::string::npos) return std::atoi(o.what().c_str() + at + 5);
  }
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    if (outcomes[r].error) return static_cast<int>(r);
  }
  return -1;
}

void expect_wait(const WaitReport& got, const WaitReport& want) {
  EXPECT_EQ(got.rank, want.rank);
  EXPECT_EQ(got.stage, want.stage);
  EXPECT_EQ(got.tile, want.tile);
  EXPECT_EQ(got.peer, want.peer);
  EXPECT_EQ(got.expected, want.expected);
  EXPECT_EQ(got.seen, want.seen);
  EXPECT_EQ(got.limit_ms, want.limit_ms);
}

// ---- A rank that never calls

struct SilentCall {
  const char* name;
  const char* stage;  // that the others report
  std::function<void(LayerGroup&, int)> call;
};

class SilentRank : public ::testing::TestWithParam<SilentCall> {};

INSTANTIATE_TEST_SUITE_P(
    Calls, SilentRank,
    ::testing::Values(
        SilentCall{"Plan", "plan",
                   [](LayerGroup& g, int rank) { g.layer(rank).plan(g.split().topk_ids(rank)); }},
        SilentCall{"Forward", "enter", [](LayerGroup& g, int rank) { g.forward(rank); }},
        SilentCall{"Backward", "enter", [](LayerGroup& g, int rank) { g.backward(rank); }},
        SilentCall{"Layer", "plan",
                   [](LayerGroup& g, int rank) {
                     const Layer layer(g.split().problem(),
                                       g.group()[static_cast<std::size_t>(rank)],
                                       {.timeout_ms = short_limit_ms()});
                   }}),
    [](const auto& test) { return test.param.name; });

TEST_P(SilentRank, IsNamedByTheOthersWithinTheLimit) {
  constexpr int kSize = 4;
  constexpr int kSilent = 2;
  LayerGroup g(plain_layer(kSize), kSize);
  g.make_layers([](int) { return LayerOptions{.timeout_ms = short_limit_ms()}; });
  g.make_plans();
  g.each([&](int rank) { g.forward(rank); });
  g.clear_result();

  auto outcomes = g.attempt([&](int rank) {
    if (rank != kSilent) GetParam().call(g, rank);  // the silent rank's thread ends
  });
  outcomes.erase(outcomes.begin() + kSilent);
  const double limit_s = short_limit_ms() * 1e-3;
  expect_all_failed(outcomes, limit_s);
  g.expect_untouched("nobody entered the pass");

  int timeouts = 0;
  std::string sentence;
  int origin = -1;
  for (const Outcome& o : outcomes) {
    if (!o.error->wait()) continue;
    ++timeouts;
    const WaitReport& w = *o.error->wait();
    expect_wait(w, {.rank = w.rank,
                    .stage = GetParam().stage,
                    .tile = -1,
                    .peer = kSilent,
                    .expected = kSize,
                    .seen = kSize - 1,
                    .limit_ms = short_limit_ms()});
    EXPECT_STATES(o.what(), cat("rank ", w.rank, ": wait expired after ", w.limit_ms,
                                " ms (timeout_ms or UNIEP_TIMEOUT_MS) in stage ", GetParam().stage,
                                ", peer 2: expected 4 ranks present, seen 3"));
    EXPECT_GE(o.seconds, limit_s * 0.99);
    origin = w.rank;
    sentence = o.what();
  }
  ASSERT_EQ(timeouts, 1) << "the others hear of the first";
  expect_unusable(g, origin, sentence);
}

TEST(Failure, ALateRankIsToldThatTheGroupIsUnusable) {
  LayerGroup g(plain_layer(2), 2);
  g.make_layers([](int) { return LayerOptions{.timeout_ms = 100}; });
  g.make_plans();
  const auto outcomes = g.attempt([&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
    g.forward(rank);
  });
  EXPECT_STATES(
      outcomes[0].what(),
      "rank 0: wait expired after 100 ms (timeout_ms or UNIEP_TIMEOUT_MS) in stage enter, "
      "peer 1: expected "
      "2 ranks present, seen 1");
  expect_repeats(outcomes[1].what(), 0, outcomes[0].what());
}

// ---- A signal that never comes

struct Withheld {
  Stage stage;          // of the tile whose signals rank 1 withholds
  int waiting_rank;     // has a short limit, so that its wait is the first to expire
  const char* waiting;  // the stage that waits
};

class WithheldSignal : public ::testing::TestWithParam<std::tuple<Withheld, const char*>> {};

std::string case_name(const ::testing::TestParamInfo<WithheldSignal::ParamType>& info) {
  std::string text = cat(name(std::get<0>(info.param).stage), "_", std::get<1>(info.param));
  for (char& c : text) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return text;
}

INSTANTIATE_TEST_SUITE_P(Stages, WithheldSignal,
                         ::testing::Combine(::testing::Values(Withheld{Stage::kDispatch, 1, "fc1"},
                                                              Withheld{Stage::kFc1, 1, "fc2"},
                                                              Withheld{Stage::kFc2, 0, "reduce"},
                                                              Withheld{Stage::kFc2, 2, "reduce"},
                                                              Withheld{Stage::kDispatch, 1, "dfc2"},
                                                              Withheld{Stage::kDfc2, 1, "dfc1"},
                                                              Withheld{Stage::kDfc1, 0, "reduce"}),
                                            ::testing::Values("single", "sequential")),
                         [](const auto& test) { return case_name(test) + cat("_", test.index); });

constexpr int kCallers = 3;
constexpr int kCulprit = 1;

bool is_backward(const Withheld& w) {
  return w.stage == Stage::kDfc2 || w.stage == Stage::kDfc1 || w.waiting == std::string("dfc2");
}

/// 12 tokens of 2 slots a rank over 6 experts in turn: each expert has 4 rows of each rank. Tiles
/// of all 12 rows of an expert, 64 of 72 columns.
Schedule schedule_of(const char* preset) {
  Schedule s = parse_schedule(preset);
  s.tile_m = 128;
  s.tile_n = 64;
  s.pull_tokens = 4;
  s.token_block = 32;
  s.workers = 1;  // with more, any of them could be the first to give up
  return s;
}

/// What the waiting rank must report. Tile 0 of the culprit's is withheld, the first 4 pulls or the
/// first expert's first columns.
WaitReport report_of(const Withheld& w) {
  WaitReport r{.rank = w.waiting_rank,
               .stage = w.waiting,
               .tile = 0,
               .peer = kCulprit,
               .limit_ms = short_limit_ms()};
  switch (w.stage) {
    case Stage::kDispatch:  // 4 of 12 rows
      r.expected = 12, r.seen = 8;
      break;
    case Stage::kFc1:  // 1 of 2 column tiles of 32 (I = 40)
      r.expected = 2, r.seen = 1;
      break;
    case Stage::kDfc2:  // the only column tile
      r.expected = 1, r.seen = 0;
      break;
    default:  // 4 rows of 64 columns, of 8 rows of 72 columns
      r.expected = 8 * 72, r.seen = 8 * 72 - 4 * 64;
      break;
  }
  return r;
}

TEST_P(WithheldSignal, IsReportedWithAllItsNumbersAndEndsEveryRank) {
  const auto& [withheld, preset] = GetParam();
  const NewThreads workers;
  {
    LayerGroup g(plain_layer(kCallers), kCallers, true);
    const bool backward = is_backward(withheld);
    const Schedule schedule = schedule_of(preset);
    // Forward and backward share the dispatch stage: forward is done by layers without the fault.
    g.make_layers();
    g.make_plans();
    if (backward) g.each([&](int rank) { g.forward(rank, schedule); });
    g.make_layers([&](int rank) {
      return LayerOptions{
          .timeout_ms = rank == withheld.waiting_rank ? short_limit_ms() : kLongLimitMs,
          .fault_injection = {.withhold_rank = kCulprit, .withhold_stage = withheld.stage}};
    });

    std::atomic<int> inside{0};
    const auto outcomes = g.attempt([&](int rank) {
      ++inside;  // so that the short limit does not run while others are still being started
      while (inside < kCallers) std::this_thread::yield();
      if (backward) {
        g.backward(rank, schedule);
      } else {
        g.forward(rank, schedule);
      }
      g.layer(rank).plan(g.split().topk_ids(rank));  // for ranks that missed nothing in the pass
    });
    expect_all_failed(outcomes, short_limit_ms() * 1e-3);

    const WaitReport want = report_of(withheld);
    const Outcome& origin = outcomes[static_cast<std::size_t>(withheld.waiting_rank)];
    ASSERT_TRUE(origin.error->wait()) << origin.what();
    expect_wait(*origin.error->wait(), want);
    const char* counter = withheld.stage == Stage::kDispatch          ? "rows_ready"
                          : withheld.waiting == std::string("reduce") ? "arrived"
                                                                      : "tile_done";
    const std::string sentence =
        cat("rank ", want.rank, ": wait expired after ", want.limit_ms,
            " ms (timeout_ms or UNIEP_TIMEOUT_MS) in stage ", want.stage,
            ", tile 0, peer 1: expected ", want.expected, " ", counter, ", seen ", want.seen);
    EXPECT_STATES(origin.what(), sentence);
    EXPECT_EQ(origin_of(outcomes), want.rank);
    for (const Outcome& o : outcomes) {
      if (&o == &origin) continue;
      expect_repeats(o.what(), want.rank, origin.what());
    }
    expect_unusable(g, want.rank, origin.what());
  }
  EXPECT_EQ(workers.settled_at(0), 0) << "every worker has ended";
}

// With several workers any of them may be the first to give up. Whichever it is, the rank's error
// and what the group repeats are the same.
TEST(Failure, OfSeveralWorkersThatGiveUpTheFirstIsHeardEverywhere) {
  for (int repeat = 0; repeat < 5; ++repeat) {
    LayerGroup g(plain_layer(2), 2);
    g.make_layers([](int rank) {
      return LayerOptions{
          .timeout_ms = rank == 0 ? 60 : kLongLimitMs,
          .fault_injection = {.withhold_rank = 0, .withhold_stage = Stage::kDispatch}};
    });
    g.make_plans();
    Schedule schedule = schedule_of("single");
    schedule.workers = 4;
    const auto outcomes = g.attempt([&](int rank) {
      g.forward(rank, schedule);
      g.layer(rank).plan(g.split().topk_ids(rank));
    });
    ASSERT_TRUE(outcomes[0].error && outcomes[0].error->wait()) << outcomes[0].what();
    expect_repeats(outcomes[1].what(), 0, outcomes[0].what());
  }
}

TEST(Failure, OtherGroupsOfTheProcessGoOnWorking) {
  LayerGroup broken(plain_layer(2), 2);
  broken.make_layers([](int) { return LayerOptions{.timeout_ms = 50}; });
  broken.attempt([&](int rank) {
    if (rank == 0) broken.layer(rank).plan(broken.split().topk_ids(rank));
  });
  LayerGroup healthy(plain_layer(2), 2);
  healthy.make_layers();
  healthy.expect_step_works("beside a group that failed");
}

TEST(Failure, TheLimitComesFromTheEnvironmentWhereTheOptionsLeaveItOpen) {
  const ScopedEnv limit("UNIEP_TIMEOUT_MS", "60");
  LayerGroup g(plain_layer(2), 2);
  const auto outcomes = g.attempt([&](int rank) {
    if (rank == 1) const Layer layer(g.split().problem(), g.group()[1]);
  });
  EXPECT_NE(outcomes[1].what().find(
                "wait expired after 60 ms (timeout_ms or UNIEP_TIMEOUT_MS) in stage plan"),
            std::string::npos)
      << outcomes[1].what();
}

}  // namespace
}  // namespace uniep::testing
