#include "uniep/problem.h"

#include <gtest/gtest.h>

#include <functional>

#include "support/expect_error.h"

namespace uniep::testing {
namespace {

Problem good() {
  return {.hidden = 64, .intermediate = 32, .num_experts = 8, .topk = 2, .max_tokens = 16};
}

void expect_refused(const std::function<void(Problem&)>& spoil, const std::string& sentence) {
  Problem p = good();
  spoil(p);
  expect_invalid(sentence, [&] { validate(p, 4); });
}

TEST(Problem, AGoodOneIsAccepted) { EXPECT_NO_THROW(validate(good(), 4)); }

TEST(Problem, TheEndsOfTheRangesAreAccepted) {
  const auto accepted = [](const std::function<void(Problem&)>& change) {
    Problem p = good();
    change(p);
    EXPECT_NO_THROW(validate(p, 4)) << to_string(p);
  };
  accepted([](Problem& p) { p.hidden = 8; });
  accepted([](Problem& p) { p.hidden = 1048576; });
  accepted([](Problem& p) { p.intermediate = 8; });
  accepted([](Problem& p) { p.intermediate = 1048576; });
  accepted([](Problem& p) { p.num_experts = 4; });
  accepted([](Problem& p) { p.num_experts = 65536; });
  accepted([](Problem& p) { p.topk = 1; });
  accepted([](Problem& p) { p.topk = kMaxTopk; });
  accepted([](Problem& p) { p.topk = 16, p.num_experts = 4; });  // an expert may be named twice
  accepted([](Problem& p) { p.shared_experts = kMaxTopk - p.topk; });
  accepted([](Problem& p) { p.max_tokens = 0; });
  accepted([](Problem& p) { p.max_tokens = 1 << 26; });
  accepted([](Problem& p) { p.capacity_rows = 1; });
  accepted([](Problem& p) { p.capacity_rows = 2147483647; });
  for (const int align : {16, 32, 64, 128, 256}) {
    accepted([&](Problem& p) { p.row_align = align; });
  }
}

TEST(Problem, EachFieldOutOfRangeIsNamedWithWhatIsAccepted) {
  const std::string dimension = "; a multiple of 8 from 8 to 1048576 is accepted";
  for (const std::int64_t v : {-8, 0, 4, 12, 1048584}) {
    const std::string value = std::to_string(v);
    expect_refused([&](Problem& p) { p.hidden = v; }, "problem.hidden is " + value + dimension);
    expect_refused([&](Problem& p) { p.intermediate = v; },
                   "problem.intermediate is " + value + dimension);
  }
  expect_refused([](Problem& p) { p.num_experts = 0; },
                 "problem.num_experts is 0; 1 to 65536 is accepted");
  expect_refused([](Problem& p) { p.num_experts = 65540; },
                 "problem.num_experts is 65540; 1 to 65536 is accepted");
  expect_refused([](Problem& p) { p.num_experts = 6; },
                 "problem.num_experts is 6, which 4 ranks do not divide; a multiple of the number "
                 "of ranks is accepted");
  expect_refused([](Problem& p) { p.topk = 0; }, "problem.topk is 0; 1 to 16 is accepted");
  expect_refused([](Problem& p) { p.topk = 17; }, "problem.topk is 17; 1 to 16 is accepted");
  expect_refused([](Problem& p) { p.max_tokens = -1; },
                 "problem.max_tokens is -1; 0 to 67108864 is accepted");
  expect_refused([](Problem& p) { p.capacity_rows = -1; },
                 "problem.capacity_rows is -1; 0 to 2147483647 is accepted");
  for (const int align : {0, 8, 24, 96, 512, -16}) {
    expect_refused(
        [&](Problem& p) { p.row_align = align; },
        "problem.row_align is " + std::to_string(align) + "; 16, 32, 64, 128 or 256 is accepted");
  }
  for (const std::int64_t rows : {std::int64_t{-128}, std::int64_t{64}, std::int64_t{1} << 31}) {
    expect_refused([&](Problem& p) { p.backward_rows = rows; },
                   "problem.backward_rows is " + std::to_string(rows) +
                       "; 0 (all), or a multiple of row_align=128 up to 2147483647 is accepted");
  }
  expect_refused([](Problem& p) { p.save = static_cast<Save>(3); },
                 "problem.save is 3; 0 (rows), 1 (tokens) and 2 (none) are accepted");
  expect_refused([](Problem& p) { p.activation = static_cast<Activation>(10); },
                 "problem.activation is 10; 0 to 9 (swiglu, geglu, geglu_tanh, reglu, gpt_oss, "
                 "swiglu_clamped, swiglu_softcapped, relu2, gelu, silu) are accepted");
  expect_refused([](Problem& p) { p.activation = static_cast<Activation>(-1); },
                 "problem.activation is -1; 0 to 9 (swiglu, geglu, geglu_tanh, reglu, gpt_oss, "
                 "swiglu_clamped, swiglu_softcapped, relu2, gelu, silu) are accepted");
  expect_refused([](Problem& p) { p.probs = static_cast<Probs>(2); },
                 "problem.probs is 2; 0 (before) and 1 (after) are accepted");
  for (const int groups : {-1, 0, 3, 16}) {
    expect_refused([&](Problem& p) { p.combine_groups = groups; },
                   "problem.combine_groups is " + std::to_string(groups) +
                       "; a divisor of num_experts=8 from 1 on is accepted");
  }
  for (const int shared : {-1, 15, 2147483647}) {
    expect_refused([&](Problem& p) { p.shared_experts = shared; },
                   "problem.shared_experts is " + std::to_string(shared) +
                       "; with topk=2, 0 to 14 is accepted");
  }
  const std::string alone = "shared experts are accepted without biases and with combine_groups=1";
  expect_refused([](Problem& p) { p.shared_experts = 1, p.bias = true; },
                 "problem.shared_experts is 1, and experts have biases; " + alone);
  expect_refused([](Problem& p) { p.shared_experts = 1, p.combine_groups = 2; },
                 "problem.shared_experts is 1, and there are combine groups; " + alone);
  expect_refused([](Problem& p) { p.slot_rows = true, p.combine_groups = 2; },
                 "problem.slot_rows is true, with combine_groups=2 and shared_experts=0; 1 and 0 "
                 "are accepted with it");
  expect_refused([](Problem& p) { p.slot_rows = true, p.shared_experts = 1; },
                 "problem.slot_rows is true, with combine_groups=1 and shared_experts=1; 1 and 0 "
                 "are accepted with it");
  expect_refused([](Problem& p) { p.combine_partials = static_cast<CombinePartials>(2); },
                 "problem.combine_partials is 2; 0 (fp32) and 1 (bf16) are accepted");
  for (const int hosts : {-1, 0, 4097}) {
    expect_refused(
        [&](Problem& p) { p.gathered_hosts = hosts; },
        "problem.gathered_hosts is " + std::to_string(hosts) + "; 1 to 4096 is accepted");
  }
  expect_refused([](Problem& p) { p.gathered_hosts = 3; },
                 "problem.gathered_hosts is 3, and max_tokens 16; a divisor of max_tokens is "
                 "accepted");
  for (const int host : {-2, 2}) {
    expect_refused([&](Problem& p) { p.gathered_hosts = 2, p.first_host = host; },
                   "problem.first_host is " + std::to_string(host) + "; -1 to 1 is accepted");
  }
  expect_refused([](Problem& p) { p.max_tokens = p.gathered_hosts = 15, p.first_host = 3; },
                 "problem.first_host is 3, and gathered_hosts 15; tokens of at most 14 hosts come "
                 "in waves, and with more -1 is accepted");
  expect_invalid("number of ranks is 0; at least 1 is accepted", [] { validate(good(), 0); });
}

TEST(Problem, PrintsEveryField) {
  Problem p = good();
  p.capacity_rows = 99;
  p.row_align = 32;
  p.save = Save::kNone;
  p.recompute_h = true;
  p.backward_rows = 64;
  p.activation = Activation::kGptOss;
  p.probs = Probs::kAfter;
  p.bias = true;
  p.combine_groups = 4;
  p.combine_partials = CombinePartials::kBf16;
  p.shared_experts = 1;
  p.slot_rows = true;
  p.gathered_hosts = 4;
  p.first_host = 3;
  EXPECT_EQ(to_string(p),
            "hidden=64,intermediate=32,num_experts=8,topk=2,max_tokens=16,capacity_rows=99,"
            "row_align=32,save=none,recompute_h=yes,backward_rows=64,activation=gpt_oss,"
            "probs=after,bias=yes,combine_groups=4,combine_partials=bf16,shared_experts=1,"
            "slot_rows=yes,gathered_hosts=4,first_host=3");
}

TEST(Problem, PrintsDifferentOnesDifferently) {
  Problem other = good();
  other.first_host = 0;
  ASSERT_NE(other, good());
  EXPECT_NE(to_string(other), to_string(good()));
}

TEST(Problem, TheDefaultCapacityOfASmallLayerHoldsEveryTokenOfEveryRankOnOneRank) {
  // 4 ranks of 16 tokens with 2 slots each; 2 local experts, each up to 127 rows of padding.
  EXPECT_EQ(capacity_rows(good(), 4), 4 * 16 * 2 + 2 * 127);
}

TEST(Problem, TheDefaultCapacityOfALargeLayerIsTwiceTheBalancedLoadAtAnyNumberOfRanks) {
  Problem p{
      .hidden = 7168, .intermediate = 2048, .num_experts = 256, .topk = 8, .max_tokens = 8192};
  for (const int ranks : {4, 8, 64}) {
    EXPECT_EQ(capacity_rows(p, ranks), 2 * 8192 * 8 + 256 / ranks * 127);
  }
  // Any routing takes no more at 2 ranks, and less at 1.
  EXPECT_EQ(capacity_rows(p, 2), 2 * 8192 * 8 + 128 * 127);
  EXPECT_EQ(capacity_rows(p, 1), 8192 * 8 + 256 * 127);
  p.capacity_rows = 5;
  EXPECT_EQ(capacity_rows(p, 8), 5);
}

TEST(Problem, ALayerIsSmallAsLongAsTheRowsOfAnyRoutingTakeAGibibyte) {
  // 4 ranks of T tokens, and 2 * 127 rows of padding. A row has x, dy, h, dh and a in bf16, and in
  // fp32 its probability and the 32 column groups of its dprobs.
  constexpr std::int64_t kRowBytes = 2 * (2 * 1024 + 5 * 2048) + 4 * (1 + 32);
  Problem p{.hidden = 1024, .intermediate = 2048, .num_experts = 8, .topk = 1, .max_tokens = 0};
  const std::int64_t most = ((std::int64_t{1} << 30) / kRowBytes - 2 * 127) / 4;
  p.max_tokens = most;
  EXPECT_EQ(capacity_rows(p, 4), 4 * most + 2 * 127);
  p.max_tokens = most + 1;
  EXPECT_EQ(capacity_rows(p, 4), 2 * (most + 1) + 2 * 127);
}

TEST(Problem, CapacitiesAreOfValidProblems) {
  for (const auto& rows : {rows_of_any_routing, capacity_rows}) {
    for (const int ranks : {0, -1, 3}) EXPECT_THROW(rows(good(), ranks), Error);
    Problem p = good();
    p.topk = 1 << 30;
    EXPECT_THROW(rows(p, 4), Error);
    p.capacity_rows = 5;
    EXPECT_THROW(rows(p, 4), Error);
  }
}

TEST(Problem, RowNumbersFitAnIntWhateverTheCapacity) {
  Problem p = good();
  p.max_tokens = 1 << 26;
  p.topk = 16;
  EXPECT_EQ(capacity_rows(p, 4), 2147483647);
}

}  // namespace
}  // namespace uniep::testing
