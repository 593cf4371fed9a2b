#include "tune/search/race.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "support/cases.h"

namespace uniep::tune {
namespace {

/// Runs a race on made-up times with noise; candidate i takes seconds[i].
int run(Race& race, const std::vector<double>& seconds, double noise, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal(0, noise);
  double drift = 1;
  int measured = 0;
  while (const auto c = race.next()) {
    drift *= 1.0005;  // a machine that gets hotter
    const bool hiccup = rng() % 20 == 0;
    race.record(*c, drift * seconds[*c] * std::exp(normal(rng)) * (hiccup ? 1.5 : 1));
    ++measured;
  }
  return measured;
}

TEST(Race, EveryRoundMeasuresEachOnceInAnotherOrder) {
  Race race(5, {.min_rounds = 3, .max_rounds = 3});
  std::set<std::vector<std::size_t>> orders;
  for (int round = 0; round < 3; ++round) {
    std::vector<std::size_t> order;
    for (int i = 0; i < 5; ++i) {
      order.push_back(*race.next());
      race.record(order.back(), 1);
    }
    EXPECT_EQ(std::set(order.begin(), order.end()).size(), 5u);
    orders.insert(order);
  }
  EXPECT_GT(orders.size(), 1u);
  EXPECT_EQ(race.next(), std::nullopt);
  EXPECT_TRUE(race.decided()) << "they are all the same";
}

TEST(Race, FindsTheFastestUnderNoiseAndDrift) {
  std::vector<double> seconds;
  for (int i = 0; i < 16; ++i) seconds.push_back(1 + 0.03 * ((i * 7) % 16));
  int right = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Race race(seconds.size(), {.seed = seed});
    run(race, seconds, 0.02, seed);
    right += race.ranking().front() == 0 ? 1 : 0;
  }
  EXPECT_GE(right, 48);
}

TEST(Race, LeavesTheSlowBehindEarly) {
  std::vector<double> seconds(20, 3.0);
  seconds[7] = 1;
  Race race(seconds.size(), {});
  EXPECT_LE(run(race, seconds, 0.01, 3), 2 * 20 + 10);
  EXPECT_TRUE(race.decided());
  EXPECT_EQ(race.ranking().front(), 7u);
}

TEST(Race, TwoRoundsAreEnoughWhereOneIsHopeless) {
  Race race(3, {});
  const std::vector<double> seconds = {1, 1.6, 1.4};
  while (const auto c = race.next()) race.record(*c, seconds[*c]);
  EXPECT_EQ(race.seconds(1).size(), 2u);
  EXPECT_GE(race.seconds(2).size(), 5u);
}

TEST(Race, OneSlowRoundIsNotHopeless) {
  Race race(2, {});
  while (const auto c = race.next()) {
    race.record(*c, *c == 1 && race.rounds() == 0 ? 1.6 : 1.0);
  }
  EXPECT_GE(race.seconds(1).size(), 5u);
}

TEST(Race, StopsWhereTheBestCannotBeToldApart) {
  Race race(3, {.max_rounds = 1000, .close = 0.01});
  run(race, {1, 1.0001, 1.0002}, 0.005, 1);
  EXPECT_TRUE(race.decided());
  EXPECT_LT(race.rounds(), 300);
}

TEST(Race, TheReferenceIsMeasuredToTheEndAndDriftDoesNoHarm) {
  Race race(4, {.keep_reference = true, .max_rounds = 30, .close = 1e-6});
  const std::vector<double> seconds = {2, 1.0, 1.0, 1.9};
  double drift = 1;
  while (const auto c = race.next()) {
    drift *= 1.02;  // twice as slow after 35 measurements
    race.record(*c, drift * seconds[*c]);
  }
  EXPECT_EQ(race.seconds(0).size(), 30u);
  EXPECT_LT(race.seconds(3).size(), 30u) << "left behind, although it is faster than the reference";
  EXPECT_NEAR(race.speedup(1), 2, 0.1);
  EXPECT_TRUE(race.is_faster(1));
  EXPECT_FALSE(race.is_faster(0));
  EXPECT_NEAR(race.speedup(3), 2 / 1.9, 0.1);
  const auto ranking = race.ranking();
  EXPECT_EQ(ranking[2], 0u);
  EXPECT_EQ(ranking[3], 3u) << "what was left behind stands behind";
}

TEST(Race, AReferenceThatWasUnluckyAtFirstStillWins) {
  Race race(3, {.keep_reference = true, .max_rounds = 40});
  int round = 0;
  while (const auto c = race.next()) {
    const bool unlucky = race.rounds() < 6;
    race.record(*c, *c == 0 ? (unlucky ? 1.2 : 0.8) : 1.0 + 0.03 * (++round % 7));
  }
  EXPECT_EQ(race.ranking().front(), 0u);
}

TEST(Race, OneThatIsFasterByChanceAloneIsNot) {
  int called = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Race race(2, {.keep_reference = true, .max_rounds = 20, .close = 1e-6, .seed = seed});
    run(race, {1, 1}, 0.05, seed);
    called += race.is_faster(1) ? 1 : 0;
  }
  EXPECT_LE(called, 4);
}

/// Races of 20 candidates with 2 % of noise, the fourth of which takes `seconds`: those whose
/// winner is called faster than the reference, by the winner.
struct Called {
  int races = 0;
  int fourth = 0;
  int others = 0;
};

Called called_faster(double seconds, int rounds) {
  std::vector<double> all(20, 1);
  all[3] = seconds;
  Called called{.races = testing::cases(500)};
  for (std::uint64_t seed = 0; seed < static_cast<std::uint64_t>(called.races); ++seed) {
    Race race(all.size(), {.keep_reference = true, .max_rounds = rounds, .seed = seed});
    std::mt19937_64 rng(seed + 1000);
    std::normal_distribution<double> noise(0, 0.02);
    while (const auto c = race.next()) race.record(*c, all[*c] * std::exp(noise(rng)));
    const std::size_t best = race.ranking().front();
    (best == 3 ? called.fourth : called.others) += race.is_faster(best) ? 1 : 0;
  }
  return called;
}

TEST(Race, TheBestOfManyEqualOnesIsNotCalledFaster) {
  for (int rounds = 2; rounds <= 12; ++rounds) {
    const Called called = called_faster(1, rounds);
    EXPECT_LE(called.fourth + called.others, called.races * 3 / 100 + 1)
        << "of " << called.races << ", in " << rounds << " rounds";
  }
}

TEST(Race, OneThatIsFasterByTwiceTheNoiseIsCalledSoWithinSixteenRounds) {
  const Called called = called_faster(0.95, 16);
  EXPECT_GE(called.fourth, called.races * 95 / 100 - 1);
  EXPECT_EQ(called.others, 0);
}

TEST(Race, TheMoreCandidatesTheMoreRoundsItTakes) {
  EXPECT_EQ(Race(2, {}).rounds_to_tell(), 5);
  EXPECT_EQ(Race(20, {}).rounds_to_tell(), 9);
  EXPECT_EQ(Race(1000, {}).rounds_to_tell(), 15);
}

/// Whether the second of some candidates is called faster than the reference after so many rounds,
/// of which it lost the first ones.
bool is_called_faster(std::size_t candidates, int rounds, int lost) {
  Race race(candidates, {.keep_reference = true, .min_rounds = rounds, .max_rounds = rounds});
  while (const auto c = race.next()) {
    race.record(*c, *c != 1 ? 1.0 : race.rounds() < lost ? 1.1 : 0.9);
  }
  EXPECT_EQ(race.seconds(1).size(), static_cast<std::size_t>(rounds));
  return race.is_faster(1);
}

TEST(Race, TheMoreRoundsWereLostTheMoreItTakes) {
  EXPECT_FALSE(is_called_faster(20, 8, 0));
  EXPECT_TRUE(is_called_faster(20, 9, 0));
  EXPECT_FALSE(is_called_faster(20, 12, 1));
  EXPECT_TRUE(is_called_faster(20, 13, 1));
  // With probabilities 56/1024 and 67/2048; that of two lost rounds alone would be 45/1024.
  EXPECT_FALSE(is_called_faster(2, 10, 2));
  EXPECT_TRUE(is_called_faster(2, 11, 2));
}

TEST(Race, AsFastInEveryRoundIsNotFaster) {
  Race race(2, {.keep_reference = true, .min_rounds = 20, .max_rounds = 20});
  while (const auto c = race.next()) race.record(*c, 1);
  EXPECT_FALSE(race.is_faster(1));
}

// All but two are left behind at once, and the reference after five rounds, too few for a verdict.
TEST(Race, GoesOnUntilTheBestIsKnownToBeFaster) {
  std::vector<double> seconds(20, 3.0);
  seconds[7] = 1;
  Race race(seconds.size(), {.keep_reference = true});
  run(race, seconds, 0.01, 3);
  EXPECT_TRUE(race.decided());
  EXPECT_TRUE(race.is_faster(7));
  EXPECT_LE(race.rounds(), 12);
}

TEST(Race, RejectedCandidatesNeverWin) {
  Race race(3, {.max_rounds = 5});
  while (const auto c = race.next()) {
    if (*c == 0) {
      race.reject(0);
    } else {
      race.record(*c, 1.0 + static_cast<double>(*c));
    }
  }
  EXPECT_EQ(race.ranking(), (std::vector<std::size_t>{1, 2}));
  EXPECT_TRUE(race.rejected(0));
}

TEST(Race, WithoutAnybodyLeftIsOver) {
  Race race(2, {});
  race.reject(0);
  race.reject(1);
  EXPECT_EQ(race.next(), std::nullopt);
  EXPECT_TRUE(race.ranking().empty());
  EXPECT_EQ(Race(0, {}).next(), std::nullopt);
}

}  // namespace
}  // namespace uniep::tune
