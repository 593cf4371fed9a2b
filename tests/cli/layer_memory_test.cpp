#include "common/layer_memory.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "uniep/error.h"
#include "uniep/layer.h"

namespace uniep::tool {
namespace {

Problem layer_problem() {
  Problem p{.hidden = 512, .intermediate = 256, .num_experts = 16, .topk = 3, .max_tokens = 1000};
  p.capacity_rows = 9000;
  return p;
}

TEST(BalancedRows, AreThoseOfEveryExpertPadded) {
  Problem p = layer_problem();  // 3000 rows over 4 experts
  EXPECT_EQ(balanced_rows(p, 4).rows, 4 * 768);
  p.max_tokens = 128;  // 384 rows over 4, 96 each, and over 16, 24 each
  EXPECT_EQ(balanced_rows(p, 4).rows, 4 * 128);
  p.row_align = 16;
  EXPECT_EQ(balanced_rows(p, 1).rows, 16 * 32);
  p.max_tokens = 11;  // 33 rows over 16 experts: one has 3
  p.row_align = 2;
  EXPECT_EQ(balanced_rows(p, 1).rows, 15 * 2 + 4);
}

TEST(WeightParameters, AreThreeMatricesOfEveryExpert) {
  EXPECT_EQ(weight_parameters(layer_problem(), 4), 3 * 512 * 256 * 16 / 4);
}

TEST(RankBytes, OfFewerRowsAreFewer) {
  const Problem p = layer_problem();
  const RankBytes few = rank_bytes(p, 4, room_for(p, 4, 3072));
  const RankBytes many = rank_bytes(p, 4, room_for(p, 4, 9000));
  EXPECT_EQ(few.shared, many.shared);
  EXPECT_LT(few.kept, many.kept);
  EXPECT_LT(few.pass, many.pass);
}

TEST(RankBytes, OfBackwardInARingAreFewer) {
  const Problem all = layer_problem();
  Problem half = all;
  half.backward_rows = 1536;
  const RankBytes of_all = rank_bytes(all, 4, room_for(all, 4, 3072));
  const RankBytes of_half = rank_bytes(half, 4, room_for(half, 4, 3072));
  EXPECT_EQ(of_half.kept, of_all.kept);
  EXPECT_NEAR(static_cast<double>(of_half.pass), static_cast<double>(of_all.pass) / 2, 2048);
}

TEST(RankBytes, OnSeveralHostsHaveAPartForEachRankOfTheRail) {
  const Problem p = layer_problem();
  const auto symmetric = [&](int hosts) {
    return Layer::memory_needs(p, Backend::kCpu, 4, {}, hosts).symmetric;
  };
  const StepRows rows = room_for(p, 4);
  const RankBytes alone = rank_bytes(p, 4, rows);
  for (const int hosts : {2, 4}) {
    const RankBytes bytes = rank_bytes(p, 4, rows, hosts);
    EXPECT_EQ(bytes.shared - alone.shared, symmetric(hosts) - symmetric(1)) << hosts;
    EXPECT_GE(symmetric(hosts), hosts * symmetric(1)) << hosts;
    EXPECT_EQ(bytes.kept, alone.kept) << hosts;
    EXPECT_EQ(layer_memory(p, 4, hosts) - layer_memory(p, 4), symmetric(hosts) - symmetric(1));
  }
}

TEST(MemoryNeeds, RefuseHostsThatTheRanksAreNotOn) {
  for (const int hosts : {0, 3, 8}) {
    EXPECT_THROW(Layer::memory_needs(layer_problem(), Backend::kCpu, 4, {}, hosts), Error) << hosts;
  }
}

#ifdef UNIEP_HAS_CUDA
TEST(MemoryNeeds, OfGpusAreOfOneHost) {
  try {
    Layer::memory_needs(layer_problem(), Backend::kCuda, 4, {}, 2);
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnsupported) << e.what();
  }
}

// Workspaces of the Python package are as large as Layer::memory_needs says.
TEST(RankBytes, AreWhatPyTorchAllocates) {
  for (const Save save : kSaves) {
    for (const bool recompute_h : {false, true}) {
      for (const std::int64_t rows : {3072, 9000}) {
        Problem p = layer_problem();
        p.save = save;
        p.recompute_h = recompute_h;
        const MemoryNeeds needs = Layer::memory_needs(p, Backend::kCuda, 4, rows);
        const RankBytes bytes = rank_bytes(p, 4, room_for(p, 4, rows));
        EXPECT_EQ(bytes.shared, needs.workspace + needs.symmetric);
        EXPECT_EQ(bytes.pass, std::max(needs.forward_memory, needs.backward_memory));
        const std::int64_t of_x = save == Save::kNone     ? 0
                                  : save == Save::kTokens ? std::min(rows, 4 * p.max_tokens)
                                                          : rows;
        EXPECT_EQ(needs.rows_of_x, of_x);
        const std::int64_t tensors =
            of_x * 2 * p.hidden + rows * ((recompute_h ? 0 : 4 * p.intermediate) + 4);
        EXPECT_GE(bytes.kept, needs.plan + tensors);
        EXPECT_LE(bytes.kept, needs.plan + tensors + 3 * 256);  // each tensor is padded
      }
    }
  }
}
#endif

}  // namespace
}  // namespace uniep::tool
