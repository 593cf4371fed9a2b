// Tokens that come in waves: each is there before the launch that reads it, and what goes back to
// other hosts is complete while later waves are computed.
#include "schedule/token_waves.h"

#include <gtest/gtest.h>

#include <set>

#include "schedule/open_sizes.h"
#include "schedule/queue.h"
#include "schedule/random_pass.h"

namespace uniep::testing {
namespace {

/// A rank has a block of tokens of each.
int host_of(const PassView& v, std::int64_t token) {
  return static_cast<int>(token / (v.most_tokens / v.gathered_hosts));
}
/// How many hosts come ahead of it.
int distance(const PassView& v, int host) {
  return (host - v.first_host + v.gathered_hosts) % v.gathered_hosts;
}

constexpr int kRandomPasses = 2000;

/// check(view of each rank) of random passes whose tokens come in waves.
template <class Check>
void for_each_in_waves(const Check& check) {
  int found = 0;
  for_each_rank_of_random_passes(kRandomPasses, 200, [&](const RoutingPlan&, const PassView& v) {
    if (!v.comes_in_waves() || !v.moves_data()) return;
    ++found;
    check(v);
  });
  EXPECT_GT(found, cases(kRandomPasses) / 10);
}

TEST(TokenWaves, NoLaunchReadsTokensThatComeLater) {
  for_each_in_waves([](const PassView& v) {
    std::set<std::int64_t> came;  // of all ranks
    for (int i = 0; i < v.schedule.waves; ++i) {
      PassView source = v;
      for (source.rank = 0; source.rank < v.num_ranks; ++source.rank) {
        source.tokens = v.most_tokens;
        const auto [begin, end] = own_tokens_that_come(source, i);
        for (std::int64_t t = begin; t < end; ++t) came.insert(source.rank * v.most_tokens + t);
      }
      const Launch launch = launch_at(v, i);
      for (const TrackList* queue : {&launch.comm, &launch.main}) {
        for (const Task& task : tasks_of(v, *queue)) {
          if (v.stage(task.stage).grid != TileGrid::kPulls) continue;
          for (std::int64_t p = task.m; p < task.end_pull(); ++p) {
            const Pull& pull = v.pulls[p];
            ASSERT_LE(distance(v, host_of(v, pull.token)), i);
            ASSERT_TRUE(came.contains(pull.source * v.most_tokens + pull.token));
          }
        }
      }
    }
  });
}

TEST(TokenWaves, ForwardBeginsWithHalfOfWhatIsThere) {
  int some = 0;
  for_each_in_waves([&](const PassView& v) {
    if (v.pass == Pass::kBackward) return;
    const std::int64_t half = v.most_tokens * v.num_ranks / v.gathered_hosts / 2;
    for (int wave = 0; wave < v.schedule.waves; wave += v.schedule.waves - 1) {
      const auto [begin, end] = tokens_of_wave(v, wave);
      ASSERT_LE(std::abs(end - begin - half), v.schedule.token_block + 1);
      some += end > begin ? 1 : 0;
    }
  });
  EXPECT_GT(some, 0);
}

TEST(TokenWaves, EachTokenIsOfOneWave) {
  for_each_in_waves([](const PassView& v) {
    std::set<std::int64_t> seen;
    for (int wave = 0; wave < v.schedule.waves; ++wave) {
      const auto [begin, end] = own_tokens_of_wave(v, wave);
      for (std::int64_t t = begin; t < end; ++t) ASSERT_TRUE(seen.insert(t).second);
    }
    ASSERT_EQ(std::ssize(seen), v.tokens);
  });
}

/// Launches in which this rank sums blocks of tokens, by block.
std::vector<int> reduced_in(const PassView& v) {
  std::vector<int> launch_of(static_cast<std::size_t>(v.num_token_blocks()), -1);
  for (int i = 0; i < num_launches(v); ++i) {
    for (const Task& task : tasks_of(v, launch_at(v, i).main)) {
      if (v.stage(task.stage).grid != TileGrid::kTokenBlocks) continue;
      int& launch = launch_of.at(static_cast<std::size_t>(task.m));
      EXPECT_EQ(launch, -1) << "block " << task.m << " is summed twice";
      launch = i;
    }
  }
  return launch_of;
}

/// The launch behind which sums of a host's tokens are there.
int done_behind(const PassView& v, int host) {
  const int hosts = v.gathered_hosts;
  const int behind = distance(v, host);
  if (v.pass == Pass::kBackward || behind == 0) return v.schedule.waves - 1;
  return hosts > 2 && behind == hosts - 1 ? hosts : hosts - 1;
}

TEST(TokenWaves, SumsOfOtherHostsAreThereBehindTheirWaves) {
  for_each_in_waves([](const PassView& v) {
    const std::vector<int> launch_of = reduced_in(v);
    for (std::int64_t t = 0; t < v.tokens; ++t) {
      ASSERT_EQ(launch_of[static_cast<std::size_t>(t / v.schedule.token_block)],
                done_behind(v, host_of(v, t)));
    }
  });
}

TEST(TokenWaves, RowsAreComputedBeforeTheirTokensAreSummed) {
  int seams = 0;
  for_each_in_waves([&](const PassView& v) {
    for (int i = 0; i < v.num_blocks(); ++i) {
      const int launch = i / v.num_local_experts;
      for (std::int64_t t = v.tile_begin[i]; t < v.tile_begin[i + 1]; ++t) {
        const Tile& tile = v.tiles[t];
        if (v.is_shared(tile.expert)) continue;
        seams += v.pass == Pass::kForward && v.gathered_hosts > 2 && launch == v.gathered_hosts - 1;
        for (std::int64_t row = tile.first_row; row < tile.first_row + tile.rows; ++row) {
          ASSERT_LE(launch, done_behind(v, host_of(v, v.row_origin[row].token)));
        }
      }
    }
  });
  EXPECT_GT(seams, 0);
}

TEST(TokenWaves, TheSeamHasTilesOfTheLastHostAndOthersAlone) {
  int behind_it = 0;
  for_each_in_waves([&](const PassView& v) {
    if (v.pass == Pass::kBackward || v.gathered_hosts == 2) return;
    const int seam = v.gathered_hosts - 1;
    std::vector<int> tiles(static_cast<std::size_t>(v.num_local_experts));  // of the seam
    for (int i = seam * v.num_local_experts; i < (seam + 1) * v.num_local_experts; ++i) {
      for (std::int64_t t = v.tile_begin[i]; t < v.tile_begin[i + 1]; ++t) {
        ++tiles[static_cast<std::size_t>(v.tiles[t].expert)];
      }
    }
    for (int e = 0; e < v.num_local_experts; ++e) {
      std::vector<std::int64_t> rows(static_cast<std::size_t>(v.gathered_hosts));  // by distance
      for (std::int64_t r = 0; r < v.tokens_per_expert[e]; ++r) {
        const std::int64_t token = v.row_origin[v.segment_begin[e] + r].token;
        ++rows[static_cast<std::size_t>(distance(v, host_of(v, token)))];
      }
      // Where the first host has a tile's rows, no tile has the last host's and those behind it.
      if (rows[0] < v.schedule.tile_m) continue;
      ASSERT_LE(tiles[static_cast<std::size_t>(e)], 1);
      behind_it += rows.back() >= v.schedule.tile_m ? 1 : 0;
    }
  });
  // In a tenth of the cases there may be none.
  if (cases(kRandomPasses) >= kRandomPasses) {
    EXPECT_GT(behind_it, 0);
  }
}

TEST(TokenWaves, BackwardInARingHasNone) {
  const Problem p{.max_tokens = 64, .backward_rows = 128, .gathered_hosts = 2, .first_host = 0};
  EXPECT_EQ(schedule_of_pass({}, p, Pass::kBackward).launch, LaunchGrouping::kSingle);
  EXPECT_EQ(schedule_of_pass({}, p, Pass::kForward).launch, LaunchGrouping::kWaves);
}

TEST(TokenWaves, TokensThatAreAllThereHaveNone) {
  const Problem p{.max_tokens = 64, .gathered_hosts = 2};
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    EXPECT_EQ(schedule_of_pass({}, p, pass).launch, LaunchGrouping::kSingle);
  }
}

TEST(TokenWaves, ABlockOfTokensHasThoseOfOneWave) {
  for (const auto& [tokens, block] : {std::pair{2 * 64, 32}, {2 * 24, 8}, {2 * 7, 1}, {0, 32}}) {
    const Problem p{.max_tokens = tokens, .gathered_hosts = 2};
    Schedule s;
    s.token_block = 32;
    EXPECT_EQ(schedule_of_pass(s, p, Pass::kForward).token_block, block) << tokens;
  }
}

}  // namespace
}  // namespace uniep::testing
