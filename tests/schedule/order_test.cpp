// What each axis that orders tasks means. Since none changes a bit of a result, only these tests
// see whether an axis does what it says.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "schedule/pass_order.h"
#include "schedule/queue_table.h"
#include "schedule/random_pass.h"
#include "schedule/roles.h"

namespace uniep::testing {
namespace {

TEST(PassOrder, TilesAreThePlansTilesBlockByBlock) {
  for_each_rank_of_random_passes(700, 80, [](const RoutingPlan& plan, const PassView& v) {
    std::map<std::int64_t, Tile> left;
    for (const Tile& t : plan.tiles(v.schedule.tile_m)) left.emplace(t.first_row, t);
    ASSERT_EQ(v.tile_begin[0], 0);
    for (int block = 0; block < v.num_blocks(); ++block) {
      ASSERT_LE(v.tile_begin[block], v.tile_begin[block + 1]);
      for (std::int64_t i = v.tile_begin[block]; i < v.tile_begin[block + 1]; ++i) {
        ASSERT_EQ(v.tiles[i].expert, v.expert_of_block(block));
        const auto found = left.find(v.tiles[i].first_row);
        ASSERT_NE(found, left.end());
        ASSERT_EQ(found->second, v.tiles[i]);
        left.erase(found);
      }
    }
    ASSERT_TRUE(left.empty());
  });
}

TEST(PassOrder, WavesHoldEvenPartsOfEveryExpert) {
  for_each_rank_of_random_passes(500, 80, [](const RoutingPlan& plan, const PassView& v) {
    if (v.comes_in_waves()) return;
    for (int slot = 0; slot < v.num_local_experts; ++slot) {
      const std::int64_t rows = plan.tokens_per_expert()[v.expert_order[slot]];
      const std::int64_t tiles = ceil_div<std::int64_t>(rows, v.schedule.tile_m);
      for (int wave = 0; wave < v.schedule.waves; ++wave) {
        const int block = wave * v.num_local_experts + slot;
        const std::int64_t count = v.tile_begin[block + 1] - v.tile_begin[block];
        ASSERT_GE(count, tiles / v.schedule.waves);
        ASSERT_LE(count, ceil_div<std::int64_t>(tiles, v.schedule.waves));
      }
    }
  });
}

TEST(PassOrder, SharedExpertsStandFirst) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(cases(300)); ++seed) {
    Rng rng(seed);
    Routing r = random_routing(rng, 40);
    r.problem.shared_experts =
        static_cast<int>(pick(rng, 0, std::min(3, kMaxTopk - r.problem.topk)));
    const RoutingPlan plan = r.plan(0);
    const Schedule schedule = random_schedule(rng, r.problem, 4);
    const PassOrder order(plan.data(), Pass::kForward, schedule);
    const PassView& v = order.view();
    for (int slot = 0; slot < v.num_local_experts; ++slot) {
      ASSERT_EQ(v.is_shared(v.expert_order[slot]), slot < r.problem.shared_experts)
          << describe(r) << ", " << to_string(schedule);
    }
    // Reduce waits for their rows, too.
    for (std::int64_t block = 0; block < v.num_token_blocks(); ++block) {
      const std::int64_t first = block * v.schedule.token_block;
      const std::int64_t end = std::min<std::int64_t>(first + v.schedule.token_block, v.tokens);
      std::int64_t slots = (end - first) * r.problem.shared_experts;
      for (std::int64_t i = first * v.topk; i < end * v.topk; ++i) {
        if (v.topk_ids[i] >= 0 && v.topk_ids[i] < v.routed_experts()) ++slots;
      }
      ASSERT_EQ(v.slots_to_peer[block * v.num_ranks], slots);
    }
  }
}

TEST(PassOrder, ExpertsByNumberOrByTheirRows) {
  for_each_rank_of_random_passes(500, 80, [](const RoutingPlan& plan, const PassView& v) {
    const std::set<int> experts(v.expert_order, v.expert_order + v.num_local_experts);
    ASSERT_EQ(static_cast<int>(experts.size()), v.num_local_experts);
    for (int slot = 1; slot < v.num_local_experts; ++slot) {
      const int a = v.expert_order[slot - 1];
      const int b = v.expert_order[slot];
      const std::int64_t rows_a = plan.tokens_per_expert()[a];
      const std::int64_t rows_b = plan.tokens_per_expert()[b];
      switch (v.schedule.expert_order) {
        case ExpertOrder::kIndex:
          ASSERT_LT(a, b);
          break;
        case ExpertOrder::kHeavyFirst:
          ASSERT_TRUE(rows_a > rows_b || (rows_a == rows_b && a < b));
          break;
        case ExpertOrder::kLightFirst:
          ASSERT_TRUE(rows_a < rows_b || (rows_a == rows_b && a < b));
          break;
      }
    }
  });
}

/// Tiles of an expert in the order taken, over all waves.
std::vector<Tile> tiles_of_expert(const PassView& v, int slot) {
  std::vector<Tile> tiles;
  for (int wave = 0; wave < v.schedule.waves; ++wave) {
    const int block = wave * v.num_local_experts + slot;
    tiles.insert(tiles.end(), v.tiles + v.tile_begin[block], v.tiles + v.tile_begin[block + 1]);
  }
  return tiles;
}

TEST(PassOrder, RotationBeginsWithTheChosenRanksRows) {
  for_each_rank_of_random_passes(700, 80, [](const RoutingPlan& plan, const PassView& v) {
    if (v.comes_in_waves()) return;
    const int starts[] = {0, v.rank, (v.rank + 1) % v.num_ranks};  // none, own-first, next-first
    const int start = starts[static_cast<int>(v.schedule.rotate)];
    for (int slot = 0; slot < v.num_local_experts; ++slot) {
      const std::vector<Tile> tiles = tiles_of_expert(v, slot);
      if (tiles.empty()) continue;
      const int e = v.expert_order[slot];
      const std::int64_t begin = plan.segment_begin()[e];
      const std::int64_t end = begin + plan.tokens_per_expert()[e];
      std::int64_t row = begin;  // the first of that rank or a later one
      while (row < end && plan.row_origin()[row].source < start) ++row;
      if (row == end) row = begin;
      ASSERT_LE(tiles[0].first_row, row);
      ASSERT_LT(row, tiles[0].first_row + tiles[0].rows);
      for (std::size_t i = 1; i < tiles.size(); ++i) {  // then on, and round
        const bool wraps = tiles[i].first_row == begin;
        ASSERT_TRUE(wraps || tiles[i].first_row == tiles[i - 1].first_row + v.schedule.tile_m);
      }
    }
  });
}

TEST(PassOrder, SharedExpertsAreDispatchedWhereTokensDoNotLieReady) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(cases(400)); ++seed) {
    RandomPass p = random_pass(seed, 40);
    Rng rng(seed);
    Problem& problem = p.routing.problem;
    draw_shared_experts(rng, problem);
    if (chance(rng, 50)) problem.probs = Probs::kAfter;
    if (chance(rng, 30)) problem.backward_rows = 4096;
    build_orders(p);
    const bool weighs = problem.probs == Probs::kAfter && problem.shared_gate;
    const bool dispatches = p.pass == Pass::kBackward && (weighs || problem.backward_rows > 0);
    SCOPED_TRACE(describe(seed, p));
    for (int rank = 0; rank < p.ranks(); ++rank) {
      const PassView& v = p.view(rank);
      std::map<int, std::int64_t> rows;  // by expert
      for (std::int64_t i = 0; i < v.pull_begin[v.num_blocks()]; ++i) {
        ASSERT_GT(v.pulls[i].num_rows, 0);
        for (int c = 0; c < v.pulls[i].num_rows; ++c) {
          const std::int64_t row = v.pull_rows[v.pulls[i].first_row + c];
          ++rows[expert_of_row(v, static_cast<std::int32_t>(row))];
        }
      }
      for (int e = 0; e < v.num_local_experts; ++e) {
        const std::int64_t wanted = v.is_shared(e) && !dispatches ? 0 : v.tokens_per_expert[e];
        ASSERT_EQ(rows[e], wanted) << "expert " << e;
        ASSERT_EQ(v.dispatched_per_expert[e], wanted) << "expert " << e;
      }
    }
  }
}

TEST(PassOrder, PullsAreThePlansPullsOrOneARow) {
  for_each_rank_of_random_passes(700, 80, [](const RoutingPlan& plan, const PassView& v) {
    std::map<std::int32_t, Pull> left;  // by first_row
    for (const Pull& pull : plan.pulls()) {
      if (v.schedule.dispatch_wire == DispatchWire::kDedup) {
        left.emplace(pull.first_row, pull);
      } else {
        for (int c = 0; c < pull.num_rows; ++c) {
          left.emplace(pull.first_row + c, Pull{pull.source, pull.token, pull.first_row + c, 1});
        }
      }
    }
    for (std::int64_t i = 0; i < v.pull_begin[v.num_blocks()]; ++i) {
      const auto found = left.find(v.pulls[i].first_row);
      ASSERT_NE(found, left.end());
      ASSERT_EQ(found->second.source, v.pulls[i].source);
      ASSERT_EQ(found->second.token, v.pulls[i].token);
      ASSERT_EQ(found->second.num_rows, v.pulls[i].num_rows);
      left.erase(found);
    }
    ASSERT_TRUE(left.empty());
  });
}

TEST(PassOrder, PullsComeInTheOrderInWhichTilesNeedThem) {
  for_each_rank_of_random_passes(700, 80, [](const RoutingPlan&, const PassView& v) {
    std::map<std::int64_t, std::int64_t> taken_at;  // row -> position of its tile
    for (std::int64_t i = 0; i < v.tile_begin[v.num_blocks()]; ++i) {
      for (int r = 0; r < v.tiles[i].rows; ++r) taken_at[v.tiles[i].first_row + r] = i;
    }
    std::int64_t before = 0;
    for (int block = 0; block < v.num_blocks(); ++block) {
      for (std::int64_t i = v.pull_begin[block]; i < v.pull_begin[block + 1]; ++i) {
        std::int64_t needed = v.tile_begin[v.num_blocks()];
        for (int c = 0; c < v.pulls[i].num_rows; ++c) {
          needed = min_of(needed, taken_at.at(v.pull_rows[v.pulls[i].first_row + c]));
        }
        ASSERT_GE(needed, before);
        ASSERT_GE(needed, v.tile_begin[block]);
        ASSERT_LT(needed, v.tile_begin[block + 1]);
        before = needed;
      }
    }
  });
}

TEST(PassOrder, SlotsToPeerCountsTheRowsThatComeBack) {
  for_each_rank_of_random_passes(500, 80, [](const RoutingPlan& plan, const PassView& v) {
    std::map<std::pair<std::int64_t, int>, std::int64_t> slots;
    const std::int64_t topk = plan.problem().topk;
    for (std::int64_t t = 0; t < plan.tokens(); ++t) {
      for (std::int64_t k = 0; k < topk; ++k) {
        const int e = plan.topk_ids()[static_cast<std::size_t>(t * topk + k)];
        if (e >= 0) ++slots[{t / v.schedule.token_block, e / v.num_local_experts}];
      }
    }
    for (std::int64_t block = 0; block < v.num_token_blocks(); ++block) {
      for (int peer = 0; peer < v.num_ranks; ++peer) {
        ASSERT_EQ(v.slots_to_peer[block * v.num_ranks + peer], (slots[{block, peer}]));
      }
    }
  });
}

/// A pass on one rank whose experts get every token each.
RandomPass even_experts(Pass pass, int experts, std::int64_t tokens, std::int64_t hidden,
                        std::int64_t intermediate, const std::string& schedule) {
  RandomPass p;
  p.routing.problem = {.hidden = hidden,
                       .intermediate = intermediate,
                       .num_experts = experts,
                       .topk = experts,
                       .max_tokens = tokens};
  p.routing.tokens = {tokens};
  for (std::int64_t i = 0; i < tokens * experts; ++i) {
    p.routing.ids.push_back(static_cast<std::int32_t>(i % experts));
  }
  p.pass = pass;
  p.schedule = parse_schedule(schedule);
  build_orders(p);
  return p;
}

/// 1 rank, 3 experts of 100 rows each, H and I of three 64-column tiles.
RandomPass three_experts(Pass pass, const std::string& schedule) {
  return even_experts(pass, 3, 100, 192, 192, schedule);
}

/// "dispatch.0 fc1.0 ...": stage and expert of each run of tasks in a queue of a launch.
std::string runs(const RandomPass& p, int launch, bool comm = false) {
  const PassView& v = p.view(0);
  const Launch l = launch_at(v, launch);
  std::string text;
  std::string last;
  for (const Task& t : tasks_of(v, comm ? l.comm : l.main)) {
    const std::string word =
        t.expert < 0 ? std::string(name(t.stage)) : cat(name(t.stage), ".", t.expert);
    if (word != last) text += (text.empty() ? "" : " ") + word;
    last = word;
  }
  return text;
}

TEST(Launches, LagIsByHowManyExpertsFc2Follows) {
  const auto queue = [](const std::string& s) { return runs(three_experts(Pass::kForward, s), 0); };
  EXPECT_EQ(queue("single,lag=0"), "fc1.0 fc2.0 fc1.1 fc2.1 fc1.2 fc2.2 reduce");
  EXPECT_EQ(queue("single,lag=1"), "fc1.0 fc1.1 fc2.0 fc1.2 fc2.1 fc2.2 reduce");
  EXPECT_EQ(queue("single,lag=2"), "fc1.0 fc1.1 fc1.2 fc2.0 fc2.1 fc2.2 reduce");
  EXPECT_EQ(queue("single,lag=4096"), "fc1.0 fc1.1 fc1.2 fc2.0 fc2.1 fc2.2 reduce");
}

TEST(Launches, LagTilesIsHowManyTilesOfFc1StandBetween) {
  const auto queue = [](int lag, int tiles) {
    const std::string s = cat("single,tile_m=64,tile_n=128,lag=", lag, ",lag_tiles=", tiles);
    return runs(three_experts(Pass::kForward, s), 0);
  };
  // 100 rows of 192 columns an expert: 2 x 3 tiles of fc1 each.
  EXPECT_EQ(queue(0, 1), "fc1.0 fc1.1 fc2.0 fc1.2 fc2.1 fc2.2 reduce");
  EXPECT_EQ(queue(0, 6), queue(1, 0));
  EXPECT_EQ(queue(0, 7), queue(2, 0));
  EXPECT_EQ(queue(0, 65536), queue(3, 0));
  EXPECT_EQ(queue(2, 6), queue(2, 0)) << "the longer of both";
}

/// As `runs`, of blocks: those that are mixed in brackets.
std::string blocks_of(const RandomPass& p) {
  const PassView& v = p.view(0);
  std::string text;
  for_each_block(v, launch_at(v, 0).main, [&](const QueueBlock& b) {
    text += text.empty() ? "" : " ";
    if (b.mix.any() && b.mix.is_first()) text += "[";
    text += cat(name(b.stage), ".", b.block);
    if (b.mix.any() && b.mix.is_last()) text += "]";
  });
  return text;
}

TEST(Launches, LagTilesCountsThoseOfAWave) {
  const auto queue = [](int lag, int tiles) {
    const std::string s =
        cat("single,waves=2,tile_m=16,tile_n=128,lag=", lag, ",lag_tiles=", tiles);
    return blocks_of(three_experts(Pass::kForward, s));
  };
  // 100 rows of 192 columns an expert: 7 x 3 tiles of fc1 each, so 10.5 an expert and wave.
  const std::string by_one =
      "fc1.0 fc1.1 fc2.0 fc1.2 fc2.1 fc1.3 fc2.2 fc1.4 fc2.3 fc1.5 fc2.4 fc2.5 reduce.0";
  const std::string by_two =
      "fc1.0 fc1.1 fc1.2 fc2.0 fc1.3 fc2.1 fc1.4 fc2.2 fc1.5 fc2.3 fc2.4 fc2.5 reduce.0";
  EXPECT_EQ(queue(1, 0), by_one);
  EXPECT_EQ(queue(0, 10), by_one);
  EXPECT_EQ(queue(0, 11), by_two);
  EXPECT_EQ(queue(0, 21), by_two);
}

TEST(Launches, AfterAHeadStartFc2CatchesUpToTheLag) {
  const auto queue = [](Pass pass, int head_start, const std::string& rest) {
    return blocks_of(
        three_experts(pass, cat("single,tile_m=64,tile_n=128,head_start=", head_start, rest)));
  };
  EXPECT_EQ(queue(Pass::kForward, 0, ""), "fc1.0 fc1.1 fc2.0 fc1.2 fc2.1 fc2.2 reduce.0");
  EXPECT_EQ(queue(Pass::kForward, 33, ""), queue(Pass::kForward, 0, "")) << "not less than the lag";
  EXPECT_EQ(queue(Pass::kForward, 34, ""), "fc1.0 fc1.1 fc1.2 fc2.0 fc2.1 fc2.2 reduce.0");
  EXPECT_EQ(queue(Pass::kForward, 34, ",mix_run=1"),
            "fc1.0 fc1.1 [fc1.2 fc2.0 fc2.1] fc2.2 reduce.0");
  EXPECT_EQ(queue(Pass::kForward, 34, ",lag=2,mix_run=1"),
            "fc1.0 fc1.1 [fc1.2 fc2.0] fc2.1 fc2.2 reduce.0");
  EXPECT_EQ(queue(Pass::kForward, 100, ",mix_run=1"),
            "fc1.0 fc1.1 fc1.2 fc2.0 fc2.1 fc2.2 reduce.0");
  EXPECT_EQ(queue(Pass::kBackward, 34, ",mix_run=1"),
            "dfc2.0 dfc2.1 [dfc2.2 dfc1.0 dfc1.1] wgrad2.0 wgrad2.1 wgrad1.0 wgrad1.1 "
            "dfc1.2 wgrad2.2 wgrad1.2 reduce.0")
      << "weight gradients stand behind their expert's dfc1";
}

TEST(Launches, BlocksOfMoreThan1024TilesTogetherAreNotMixed) {
  const auto queue = [](std::int64_t hidden) {
    return blocks_of(even_experts(Pass::kForward, 2, 128, hidden, 2048,
                                  "single,tile_m=16,tile_n=64,lag=1,mix_run=1"));
  };
  // 8 x 64 tiles of fc1 an expert, and of fc2 8 x 64 or 8 x 65.
  EXPECT_EQ(queue(4096), "fc1.0 [fc1.1 fc2.0] fc2.1 reduce.0");
  EXPECT_EQ(queue(4104), "fc1.0 fc1.1 fc2.0 fc2.1 reduce.0");
}

TEST(Launches, NoMoreThanEightBlocksAreMixed) {
  const auto has = [](int experts, std::string_view blocks) {
    const RandomPass p = even_experts(Pass::kForward, experts, 16, 64, 64,
                                      "single,tile_m=16,tile_n=64,lag=1,head_start=88,mix_run=1");
    return blocks_of(p).find(blocks) != std::string::npos;
  };
  // All of fc1 but the last expert is ahead, and with it comes what fc2 catches up.
  EXPECT_TRUE(has(13, "fc1.11 [fc1.12 fc2.0 fc2.1 fc2.2 fc2.3 fc2.4 fc2.5 fc2.6] fc2.7"));
  EXPECT_TRUE(has(15, "fc1.13 fc1.14 fc2.0 fc2.1")) << "one block more";
}

TEST(Roles, DispatchersAreAsManyTimesMoreAsRowsAre) {
  RandomPass p = three_experts(Pass::kForward, "single,dispatch_workers=4,tile_m=16");
  const auto dispatchers = [&](std::int64_t own_tokens, int workers) {
    PassView v = p.view(0);
    v.tokens = own_tokens;
    return launch_roles(v, launch_at(v, 0), workers).dispatchers;
  };
  // 300 rows in 21 tiles of 16 in all, and an even routing brings each rank as many rows as it has
  // slots.
  EXPECT_EQ(dispatchers(100, 132), 4);
  EXPECT_EQ(dispatchers(48, 132), 8);
  EXPECT_EQ(dispatchers(32, 132), 16) << "21 tiles over 6: 3.5 is rounded up";
  EXPECT_EQ(dispatchers(0, 132), 28) << "an even routing would bring a tile per expert at most";
  EXPECT_EQ(dispatchers(400, 132), 4) << "never fewer";
  EXPECT_EQ(dispatchers(32, 20), 10) << "half of the workers at most";
  EXPECT_EQ(dispatchers(32, 6), 4) << "but what the schedule says";
  EXPECT_EQ(dispatchers(32, 3), 3);
}

TEST(Launches, WithoutDispatchWorkersDispatchRunsOneBlockAhead) {
  const std::string schedule = "single,dispatch_workers=0,lag=0";
  const RandomPass rows = three_experts(Pass::kForward, schedule + ",dispatch_wire=rows");
  EXPECT_EQ(runs(rows, 0),
            "dispatch.0 dispatch.1 fc1.0 fc2.0 dispatch.2 fc1.1 fc2.1 fc1.2 fc2.2 reduce");
  EXPECT_EQ(runs(rows, 0, true), "");
  // Every token goes to every expert, so with deduplication expert 0 has pulled them all.
  const RandomPass dedup = three_experts(Pass::kForward, schedule);
  EXPECT_EQ(runs(dedup, 0), "dispatch.0 fc1.0 fc2.0 fc1.1 fc2.1 fc1.2 fc2.2 reduce");
}

TEST(Launches, SequentialIsALaunchAStage) {
  const RandomPass p = three_experts(Pass::kForward, "sequential");
  EXPECT_EQ(num_launches(p.view(0)), 4);
  EXPECT_EQ(runs(p, 0, true), "dispatch.0");
  EXPECT_EQ(runs(p, 0), "");
  EXPECT_EQ(runs(p, 1), "fc1.0 fc1.1 fc1.2");
  EXPECT_EQ(runs(p, 2), "fc2.0 fc2.1 fc2.2");
  EXPECT_EQ(runs(p, 3), "reduce");
}

TEST(Launches, TwoKernelIsDispatchWithFc1ThenFc2WithReduce) {
  const RandomPass p = three_experts(Pass::kForward, "two-kernel");
  EXPECT_EQ(num_launches(p.view(0)), 2);
  EXPECT_EQ(runs(p, 0, true), "dispatch.0");
  EXPECT_EQ(runs(p, 0), "fc1.0 fc1.1 fc1.2");
  EXPECT_EQ(runs(p, 1), "fc2.0 fc2.1 fc2.2 reduce");
}

TEST(Launches, PipelinedDispatchesAWaveWhileItComputesTheOneBefore) {
  const RandomPass p = three_experts(Pass::kForward, "pipelined:2,lag=0");
  EXPECT_EQ(num_launches(p.view(0)), 4);
  EXPECT_EQ(runs(p, 0, true), "dispatch.0");
  EXPECT_EQ(runs(p, 0), "");
  EXPECT_EQ(runs(p, 1, true), "dispatch.0");
  EXPECT_EQ(runs(p, 1), "fc1.0 fc2.0 fc1.1 fc2.1 fc1.2 fc2.2");
  EXPECT_EQ(runs(p, 2, true), "");
  EXPECT_EQ(runs(p, 2), "fc1.0 fc2.0 fc1.1 fc2.1 fc1.2 fc2.2");
  EXPECT_EQ(runs(p, 3), "reduce");
}

TEST(Launches, PipelinedTakesTheWavesInOrder) {
  const RandomPass p = three_experts(Pass::kForward, "pipelined:3,tile_m=16,dispatch_wire=rows");
  const PassView& v = p.view(0);
  const auto wave_begin = [&](const std::int64_t* begin, int wave) {
    return begin[wave * v.num_local_experts];
  };
  for (int i = 0; i < num_launches(v); ++i) {
    for (const Task& t : tasks_of(v, launch_at(v, i).comm)) {
      EXPECT_GE(t.m, wave_begin(v.pull_begin, i));
      EXPECT_LE(t.m + t.n, wave_begin(v.pull_begin, i + 1));
    }
    for (const Task& t : tasks_of(v, launch_at(v, i).main)) {
      if (t.stage == Stage::kReduce) continue;
      EXPECT_GE(t.m, wave_begin(v.tile_begin, i - 1));
      EXPECT_LT(t.m, wave_begin(v.tile_begin, i));
    }
  }
}

TEST(Launches, PlacesOfTheWeightGradients) {
  const RandomPass separate = three_experts(Pass::kBackward, "single,lag=0,wgrad=separate");
  EXPECT_EQ(num_launches(separate.view(0)), 3);
  EXPECT_EQ(runs(separate, 0), "dfc2.0 dfc1.0 dfc2.1 dfc1.1 dfc2.2 dfc1.2 reduce");
  EXPECT_EQ(runs(separate, 1), "wgrad2.0 wgrad2.1 wgrad2.2");
  EXPECT_EQ(runs(separate, 2), "wgrad1.0 wgrad1.1 wgrad1.2");

  const RandomPass after = three_experts(Pass::kBackward, "single,lag=0,wgrad=after");
  EXPECT_EQ(num_launches(after.view(0)), 1);
  EXPECT_EQ(runs(after, 0),
            "dfc2.0 dfc1.0 dfc2.1 dfc1.1 dfc2.2 dfc1.2 "
            "wgrad2.0 wgrad1.0 wgrad2.1 wgrad1.1 wgrad2.2 wgrad1.2 reduce");

  const RandomPass filler = three_experts(Pass::kBackward, "single,lag=0,wgrad=interleaved");
  EXPECT_EQ(num_launches(filler.view(0)), 1);
  EXPECT_EQ(runs(filler, 0),
            "dfc2.0 dfc1.0 wgrad2.0 wgrad1.0 dfc2.1 dfc1.1 wgrad2.1 wgrad1.1 "
            "dfc2.2 dfc1.2 wgrad2.2 wgrad1.2 reduce");
}

TEST(Launches, APartHasItsStagesInTheOrderOfTheWhole) {
  const auto part = [](PassPart which, const std::string& schedule) {
    RandomPass p = three_experts(Pass::kBackward, schedule);
    p.part = which;
    build_orders(p);
    return p;
  };
  for (const char* wgrad : {"separate", "after", "interleaved"}) {
    const RandomPass data = part(PassPart::kData, cat("single,lag=0,wgrad=", wgrad));
    EXPECT_EQ(num_launches(data.view(0)), 1);
    EXPECT_EQ(runs(data, 0), "dfc2.0 dfc1.0 dfc2.1 dfc1.1 dfc2.2 dfc1.2 reduce");
    EXPECT_EQ(launch_number(data.view(0), 0), 0);
  }
  const RandomPass separate = part(PassPart::kWeights, "single,wgrad=separate");
  EXPECT_EQ(num_launches(separate.view(0)), 2);
  EXPECT_EQ(runs(separate, 0), "wgrad2.0 wgrad2.1 wgrad2.2");
  EXPECT_EQ(runs(separate, 1), "wgrad1.0 wgrad1.1 wgrad1.2");
  for (const char* wgrad : {"after", "interleaved"}) {
    const RandomPass together = part(PassPart::kWeights, cat("sequential,wgrad=", wgrad));
    EXPECT_EQ(num_launches(together.view(0)), 1);
    EXPECT_EQ(runs(together, 0), "wgrad2.0 wgrad1.0 wgrad2.1 wgrad1.1 wgrad2.2 wgrad1.2");
    EXPECT_EQ(runs(together, 0, true), "");
    EXPECT_EQ(launch_number(together.view(0), 0), 4);
  }
}

/// How many tasks each draw of the weight gradients has, in a pass of 2 experts with `rows` rows.
std::vector<std::uint32_t> draws_of_weights(std::int64_t rows, int wgrad_run) {
  const RandomPass p =
      even_experts(Pass::kBackward, 2, rows, 192, 192,
                   cat("single,wgrad=separate,tile_m=64,tile_n=64,wgrad_run=", wgrad_run));
  const PassView& v = p.view(0);
  std::vector<std::uint32_t> counts;
  for (int i = 0; i < num_launches(v); ++i) {
    const QueueTable queue(v, launch_at(v, i).main);
    for (std::int64_t d = 0; d < queue.view().size(); ++d) {
      const Draw draw = queue_draw(v, queue.view(), d);
      if (v.stage(draw.stage).grid == TileGrid::kWeightTiles) {
        counts.push_back(draw.count);
      } else {
        EXPECT_EQ(draw.count, 1u) << name(draw.stage);
      }
    }
  }
  return counts;
}

TEST(Queue, WeightTilesOfFewRowsAreDrawnInRuns) {
  // wgrad2 has 3 x 3 tiles an expert, wgrad1 6 x 3.
  const auto draws = [](std::vector<std::uint32_t> of_wgrad2,
                        std::vector<std::uint32_t> of_wgrad1) {
    std::vector<std::uint32_t> all;
    for (const auto* stage : {&of_wgrad2, &of_wgrad1}) {
      for (int expert = 0; expert < 2; ++expert)
        all.insert(all.end(), stage->begin(), stage->end());
    }
    return all;
  };
  const auto twos = draws({2, 2, 2, 2, 1}, std::vector<std::uint32_t>(9, 2));
  const auto ones = std::vector<std::uint32_t>(2 * (9 + 18), 1);
  for (const std::int64_t rows : {0, 1, 64}) {
    EXPECT_EQ(draws_of_weights(rows, 4), draws({4, 4, 1}, {4, 4, 4, 4, 2})) << rows;
  }
  EXPECT_EQ(draws_of_weights(65, 4), twos);
  EXPECT_EQ(draws_of_weights(128, 4), twos);
  EXPECT_EQ(draws_of_weights(129, 4), ones);
  EXPECT_EQ(draws_of_weights(129, 6), twos);
  EXPECT_EQ(draws_of_weights(1, 1), ones);
  EXPECT_EQ(draws_of_weights(1, 64), draws({9}, {18}));
}

TEST(Queue, RasterIsTheDirectionOfTheWalk) {
  const auto first_block = [](const char* schedule) {
    const RandomPass p = three_experts(Pass::kForward, schedule);
    std::string text;
    for (const Task& t : tasks_of_block(p.view(0), Stage::kFc2, 0)) {
      text += cat(t.m, ".", t.n, " ");
    }
    return text;
  };
  EXPECT_EQ(first_block("single,tile_n=64,raster=along-m"), "0.0 1.0 0.1 1.1 0.2 1.2 ");
  EXPECT_EQ(first_block("single,tile_n=64,raster=along-n"), "0.0 0.1 0.2 1.0 1.1 1.2 ");
}

TEST(Queue, ABandBoundsTheWalkAlongTheRaster) {
  const auto tiles = [](const char* schedule, std::uint32_t rows, std::uint32_t cols) {
    std::string text;
    for (std::uint32_t i = 0; i < rows * cols; ++i) {
      const GridTile t = walk(parse_schedule(schedule), rows, cols, i);
      text += cat(t.m, ".", t.n, " ");
    }
    return text;
  };
  EXPECT_EQ(tiles("raster=along-m,band=2", 7, 2),
            "0.0 1.0 0.1 1.1 2.0 3.0 2.1 3.1 4.0 5.0 4.1 5.1 6.0 6.1 ");
  EXPECT_EQ(tiles("raster=along-n,band=2", 2, 6),
            "0.0 0.1 1.0 1.1 0.2 0.3 1.2 1.3 0.4 0.5 1.4 1.5 ");
  EXPECT_EQ(tiles("raster=along-m,band=1", 3, 2), tiles("raster=along-n", 3, 2));
  for (const std::uint32_t rows : {1, 4, 5}) {
    EXPECT_EQ(tiles("raster=along-m,band=2", rows, 3), tiles("raster=along-m", rows, 3))
        << "fewer than three bands";
  }
}

TEST(Queue, AWalkTakesEveryTileOnce) {
  for (const char* raster : {"along-m", "along-n"}) {
    for (int band = 0; band <= 6; ++band) {
      for (std::uint32_t rows = 1; rows <= 9; ++rows) {
        const std::uint32_t cols = 10 - rows;
        const Schedule s = parse_schedule(cat("raster=", raster, ",band=", band));
        std::set<std::pair<std::int64_t, std::int64_t>> seen;
        for (std::uint32_t i = 0; i < rows * cols; ++i) {
          const GridTile t = walk(s, rows, cols, i);
          EXPECT_TRUE(t.m >= 0 && t.m < rows && t.n >= 0 && t.n < cols) << to_string(s);
          EXPECT_TRUE(seen.insert({t.m, t.n}).second) << to_string(s);
        }
      }
    }
  }
}

TEST(Queue, AnFc1TileHoldsHalfItsColumnsOfEitherHalf) {
  const RandomPass p = three_experts(Pass::kForward, "single,tile_n=64");
  EXPECT_EQ(column_tiles(p.view(0), Stage::kFc1), 6);
  EXPECT_EQ(column_tiles(p.view(0), Stage::kFc2), 3);
}

}  // namespace
}  // namespace uniep::testing
