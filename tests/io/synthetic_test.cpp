#include "workload/synthetic.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <set>
#include <span>

#include "base/check.h"
#include "io/io_test_util.h"
#include "support/states.h"
#include "workload/random.h"
#include "workload/split.h"

namespace uniep::workload {
namespace {

std::string shape_error(const std::string& text) {
  return io::sentence_of(ErrorCode::kInvalidArgument, [&] { parse_shape(text); });
}

/// FNV-1a over the bytes.
template <class T>
std::uint64_t checksum(const std::vector<T>& values) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const std::byte b : std::as_bytes(std::span(values))) {
    hash = (hash ^ static_cast<std::uint64_t>(b)) * 0x100000001b3u;
  }
  return hash;
}

struct Moments {
  double mean = 0;
  double variance = 0;
};

Moments moments(const std::vector<bf16>& values) {
  double sum = 0;
  double squares = 0;
  for (const bf16 v : values) {
    sum += to_float(v);
    squares += static_cast<double>(to_float(v)) * to_float(v);
  }
  const double n = static_cast<double>(values.size());
  return {sum / n, squares / n - sum / n * sum / n};
}

std::vector<std::int64_t> rows_per_expert(const LayerData& d) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(d.num_experts));
  for (const std::int32_t id : d.topk_ids) ++rows.at(static_cast<std::size_t>(id));
  return rows;
}

TEST(Shapes, NamesOfTheDesign) {
  EXPECT_EQ(parse_shape("deepseek-v3"), (ShapeSpec{"deepseek-v3", 8192, 7168, 2048, 256, 8}));
  EXPECT_EQ(parse_shape("qwen3-235b"), (ShapeSpec{"qwen3-235b", 8192, 4096, 1536, 128, 8}));
  EXPECT_EQ(parse_shape("qwen3-30b"), (ShapeSpec{"qwen3-30b", 16384, 2048, 768, 128, 8}));
  EXPECT_EQ(parse_shape("mixtral-8x7b"), (ShapeSpec{"mixtral-8x7b", 8192, 4096, 14336, 8, 2}));
  EXPECT_EQ(parse_shape("gpt-oss-120b"), (ShapeSpec{"gpt-oss-120b", 8192, 2880, 2880, 128, 4}));
  EXPECT_EQ(parse_shape("tiny"), (ShapeSpec{"tiny", 64, 64, 32, 8, 2}));
  EXPECT_EQ(parse_shape("small"), (ShapeSpec{"small", 512, 256, 128, 16, 4}));
}

TEST(Shapes, KeysReplaceFiguresAndPrintBack) {
  const ShapeSpec spec = parse_shape("tiny,tokens=7,topk=3");
  EXPECT_EQ(spec, (ShapeSpec{"tiny", 7, 64, 32, 8, 3}));
  EXPECT_EQ(to_string(spec), "tiny,tokens=7,hidden=64,intermediate=32,experts=8,topk=3");
  for (const std::string& name : shape_names()) {
    if (name == "custom") continue;
    EXPECT_EQ(parse_shape(to_string(parse_shape(name))), parse_shape(name));
  }
  EXPECT_EQ(parse_shape("custom,topk=1,experts=2,intermediate=8,hidden=16,tokens=0"),
            (ShapeSpec{"custom", 0, 16, 8, 2, 1}));
}

TEST(Shapes, GroupsLimitTheRouting) {
  const ShapeSpec spec = parse_shape("deepseek-v3,n_group=8,topk_group=4");
  EXPECT_EQ(spec.n_group, 8);
  EXPECT_EQ(spec.topk_group, 4);
  EXPECT_EQ(parse_shape(to_string(spec)), spec);
  EXPECT_NE(shape_error("tiny,n_group=3").find("n_group is 3; a divisor of the 8 experts"),
            std::string::npos);
  EXPECT_NE(shape_error("tiny,n_group=8,topk_group=1").find("topk_group is 1; "),
            std::string::npos);
  EXPECT_NE(shape_error("tiny,topk_group=2").find("topk_group is 2; 1 to n_group=1 "),
            std::string::npos);
}

TEST(Shapes, GroupsOfFewerExpertsThanSlotsDropTheRest) {
  const auto layer = [](const char* groups) {
    return make_layer(parse_shape(std::string("tiny,tokens=8,experts=3,topk=8") + groups), 1, 5, 0);
  };
  EXPECT_EQ(layer(",n_group=3,topk_group=3").topk_ids, layer("").topk_ids);
  EXPECT_NE(shape_error("tiny,experts=4,topk=8,n_group=2,topk_group=1").find("topk_group is 1; "),
            std::string::npos);
}

TEST(Shapes, Errors) {
  const std::string names =
      "deepseek-v3, qwen3-235b, qwen3-30b, mixtral-8x7b, gpt-oss-120b, tiny, small, custom are "
      "accepted";
  const std::string keys = "tokens, hidden, intermediate, experts, topk, n_group, topk_group";
  EXPECT_STATES(shape_error("huge"), "there is no shape 'huge'; " + names);
  EXPECT_STATES(shape_error(""), "there is no shape ''; " + names);
  EXPECT_STATES(shape_error("tiny,heads=3"),
                "shape 'tiny,heads=3': unknown key 'heads'; " + keys + " are accepted");
  EXPECT_STATES(shape_error("tiny,topk"),
                "shape 'tiny,topk': 'topk' is not key=value; the keys " + keys + " are accepted");
  EXPECT_STATES(shape_error("tiny,"), "shape 'tiny,': ends with ','; key=value is needed after it");
  EXPECT_STATES(shape_error("tiny,,topk=1"),
                "shape 'tiny,,topk=1': '' is not key=value; the keys " + keys + " are accepted");
  EXPECT_STATES(shape_error("tiny,topk=1,topk=1"),
                "shape 'tiny,topk=1,topk=1': topk is given twice; once is accepted");
  EXPECT_EQ(
      shape_error("tiny,hidden=12"),
      "shape 'tiny,hidden=12': hidden is '12'; a multiple of 8 from 8 to 1048576 is accepted");
  for (const char* value : {"", "x", "1x", "1.5", "-1", "99999999999999999999", "+1", " 1"}) {
    EXPECT_STATES(shape_error(std::string("tiny,tokens=") + value),
                  std::string("shape 'tiny,tokens=") + value + "': tokens is '" + value +
                      "'; an integer from 0 to 67108864 is accepted");
  }
  EXPECT_STATES(shape_error("tiny,experts=65537"),
                "shape 'tiny,experts=65537': experts is '65537'; an integer from 1 to 65536 is "
                "accepted");
  EXPECT_STATES(shape_error("tiny,topk=17"),
                "shape 'tiny,topk=17': topk is '17'; an integer from 1 to 16 is accepted");
  EXPECT_STATES(shape_error("custom,tokens=1,hidden=8,experts=1,topk=1"),
                "shape 'custom,tokens=1,hidden=8,experts=1,topk=1': custom has no intermediate; it "
                "needs all of tokens, hidden, intermediate, experts, topk");
}

TEST(PortableMath, AgreesWithTheStandardLibrary) {
  for (double x = -699.5; x <= 0; x += 0.37) {
    EXPECT_NEAR(portable_exp(x) / std::exp(x), 1, 1e-13) << x;
  }
  EXPECT_EQ(portable_exp(0), 1);
  EXPECT_EQ(portable_exp(-1e9), 0);
  for (double x = 0x1p-33; x < 1e6; x *= 1.013) {
    EXPECT_NEAR(portable_log(x), std::log(x), 1e-15 * std::max(1., std::fabs(std::log(x)))) << x;
  }
  EXPECT_EQ(portable_log(1), 0);
}

TEST(NormalStream, IsNormal) {
  std::vector<double> v(1 << 20);
  NormalStream(3, 1).fill(0, v);
  const double n = static_cast<double>(v.size());
  double sum = 0, squares = 0, neighbours = 0;
  int within_one = 0, within_three = 0;
  for (std::size_t i = 0; i < v.size(); ++i) {
    sum += v[i];
    squares += v[i] * v[i];
    if (i) neighbours += v[i] * v[i - 1];
    within_one += std::fabs(v[i]) < 1;
    within_three += std::fabs(v[i]) < 3;
  }
  EXPECT_NEAR(sum / n, 0, 0.005);
  EXPECT_NEAR(squares / n, 1, 0.007);
  EXPECT_NEAR(neighbours / n, 0, 0.005);
  EXPECT_NEAR(within_one / n, 0.6827, 0.0025);
  EXPECT_NEAR(within_three / n, 0.9973, 0.0003);
}

TEST(NormalStream, NeitherThreadsNorBlocksMatter) {
  const NormalStream stream(5, 2);
  std::vector<bf16> many(3'000'001);  // several threads
  stream.fill(0, many, 0.5);
  std::vector<double> all(many.size());
  stream.fill(0, all);
  for (std::size_t i = 0; i < many.size(); ++i) {
    ASSERT_EQ(many[i], to_bf16(static_cast<float>(0.5 * all[i]))) << i;
  }
  std::vector<bf16> few(1001);
  stream.fill(0, few, 0.5);
  EXPECT_TRUE(std::equal(few.begin(), few.end(), many.begin()));
}

TEST(MakeLayer, IsTheSameEverywhere) {
  const LayerData d = make_layer(parse_shape("tiny"), 2, 42, 0.5);
  EXPECT_EQ(checksum(d.x), 0x635b3287160a0318u);
  EXPECT_EQ(checksum(d.dy), 0xfa93cd0118291e9du);
  EXPECT_EQ(checksum(d.w1), 0xfa5c9281d0c487e9u);
  EXPECT_EQ(checksum(d.w2), 0x2c61c0ba33fc5fabu);
  EXPECT_EQ(checksum(d.topk_ids), 0x21cf97b6c56b3136u);
  EXPECT_EQ(checksum(d.topk_probs), 0x7564723f4dfd3ff2u);
}

TEST(MakeLayer, DependsOnTheTotalNumberOfTokens) {
  const LayerData one = make_layer(parse_shape("tiny,tokens=64"), 1, 7, 1);
  const LayerData four = make_layer(parse_shape("tiny,tokens=16"), 4, 7, 1);
  EXPECT_EQ(one.tokens, four.tokens);
  EXPECT_EQ(one.x, four.x);
  EXPECT_EQ(one.dy, four.dy);
  EXPECT_EQ(one.w1, four.w1);
  EXPECT_EQ(one.w2, four.w2);
  EXPECT_EQ(one.topk_ids, four.topk_ids);
  EXPECT_EQ(one.topk_probs, four.topk_probs);
}

TEST(MakeLayer, DroppedSlotsAreNullAndChangeNothingElse) {
  ShapeSpec spec = parse_shape("small");
  const LayerData whole = make_layer(spec, 1, 5, 1);
  for (const double share : {0.0, 0.25, 1.0}) {
    spec.dropped = share;
    const LayerData d = make_layer(spec, 1, 5, 1);
    std::int64_t null = 0;
    for (std::size_t slot = 0; slot < d.topk_ids.size(); ++slot) {
      const bool dropped = d.topk_ids[slot] == -1;
      null += dropped;
      EXPECT_EQ(d.topk_ids[slot], dropped ? -1 : whole.topk_ids[slot]);
      EXPECT_EQ(d.topk_probs[slot], dropped ? 0 : whole.topk_probs[slot]);
    }
    EXPECT_NEAR(static_cast<double>(null) / static_cast<double>(d.topk_ids.size()), share, 0.02);
    EXPECT_EQ(d.x, whole.x);
    spec.tokens /= 4;
    EXPECT_EQ(make_layer(spec, 4, 5, 1).topk_ids, d.topk_ids);
    spec.tokens *= 4;
  }
  spec.dropped = 0.5;
  EXPECT_NE(make_layer(spec, 1, 5, 1).topk_ids, make_layer(spec, 1, 6, 1).topk_ids);
  for (const double share : {-0.1, 1.5, std::nan("")}) {
    spec.dropped = share;
    EXPECT_STATES(io::sentence_of(ErrorCode::kInvalidArgument, [&] { make_layer(spec, 1, 5, 1); }),
                  cat("dropped is ", share, "; 0 to 1 is accepted"));
  }
}

TEST(Split, DealsTokensOutAsEvenlyAsTheyGo) {
  EXPECT_EQ(even_parts(13, 8), (std::vector<std::int64_t>{0, 1, 3, 4, 6, 8, 9, 11, 13}));
  const LayerData layer = make_layer(parse_shape("tiny,tokens=13"), 1, 0, 0);
  const Split split(layer, 8);
  EXPECT_EQ(split.tokens(4).begin, 6);
  EXPECT_EQ(split.tokens(4).end, 8);
}

TEST(MakeLayer, SeedsAndTensorsDiffer) {
  const LayerData a = make_layer(parse_shape("tiny"), 1, 1, 0);
  const LayerData b = make_layer(parse_shape("tiny"), 1, 2, 0);
  EXPECT_NE(a.x, b.x);
  EXPECT_NE(a.w1, b.w1);
  EXPECT_NE(a.topk_ids, b.topk_ids);
  EXPECT_NE(a.x, a.dy);
}

TEST(MakeLayer, ScalesOfTheTensors) {
  const LayerData d = make_layer(parse_shape("small"), 2, 1, 0);
  EXPECT_EQ(d.tokens, 1024);
  for (const auto& [tensor, variance] :
       {std::pair{&d.x, 1.}, {&d.dy, 1.}, {&d.w1, 1. / 256}, {&d.w2, 1. / 128}}) {
    const Moments m = moments(*tensor);
    EXPECT_NEAR(m.mean / std::sqrt(variance), 0, 0.01);
    EXPECT_NEAR(m.variance / variance, 1, 0.02);
  }
}

TEST(MakeLayer, RoutingIsWellFormed) {
  const LayerData d = make_layer(parse_shape("small"), 1, 1, 1);
  const auto k = static_cast<std::size_t>(d.topk);
  for (std::size_t t = 0; t < static_cast<std::size_t>(d.tokens); ++t) {
    double sum = 0;
    for (std::size_t s = 0; s < k; ++s) {
      const std::int32_t id = d.topk_ids[t * k + s];
      EXPECT_TRUE(id >= 0 && id < d.num_experts);
      for (std::size_t r = 0; r < s; ++r) {
        EXPECT_NE(id, d.topk_ids[t * k + r]);
        EXPECT_GE(d.topk_probs[t * k + r], d.topk_probs[t * k + s]);
      }
      sum += d.topk_probs[t * k + s];
    }
    EXPECT_NEAR(sum, 1, 1e-6);
  }
}

TEST(MakeLayer, GroupsLimitTheRouting) {
  const auto routing_of = [](const std::string& shape) {
    return make_routing(parse_shape(shape), 2, 5, 0.3);
  };
  const Routing free = routing_of("tiny,experts=24,topk=4");
  const Routing limited = routing_of("tiny,experts=24,topk=4,n_group=6,topk_group=2");
  std::set<std::int32_t> used;
  int same = 0;
  for (std::size_t t = 0; t < limited.topk_ids.size() / 4; ++t) {
    std::set<std::int32_t> experts, groups;
    for (std::size_t k = 0; k < 4; ++k) {
      experts.insert(limited.topk_ids[4 * t + k]);
      groups.insert(limited.topk_ids[4 * t + k] / 4);
    }
    EXPECT_EQ(experts.size(), 4u);
    EXPECT_LE(groups.size(), 2u);
    used.insert(groups.begin(), groups.end());
    same += std::equal(experts.begin(), experts.end(),
                       std::set(free.topk_ids.begin() + static_cast<std::ptrdiff_t>(4 * t),
                                free.topk_ids.begin() + static_cast<std::ptrdiff_t>(4 * t) + 4)
                           .begin())
                ? 1
                : 0;
  }
  EXPECT_EQ(used.size(), 6u) << "every group is some token's best";
  EXPECT_GT(same, 0) << "where the best experts are in two groups the limit changes nothing";
  EXPECT_EQ(routing_of("tiny,experts=24,topk=4,n_group=6,topk_group=6").topk_ids, free.topk_ids);
}

TEST(MakeLayer, TheGroupsAreThoseWithTheBestTwo) {
  // Groups of two, one of them used: both its experts, so the pair with the largest sum of logits.
  const Routing pair = make_routing(parse_shape("tiny,topk=2,n_group=4,topk_group=1"), 1, 3, 0);
  const Routing all = make_routing(parse_shape("tiny,topk=8"), 1, 3, 0);
  for (std::size_t t = 0; t < 64; ++t) {
    std::array<double, 4> score{};
    for (std::size_t k = 0; k < 8; ++k) {
      score[static_cast<std::size_t>(all.topk_ids[8 * t + k] / 2)] +=
          std::log(all.topk_probs[8 * t + k]);
    }
    const auto best = std::ranges::max_element(score) - score.begin();
    EXPECT_EQ(pair.topk_ids[2 * t] / 2, best) << t;
    EXPECT_EQ(pair.topk_ids[2 * t + 1] / 2, best) << t;
  }
}

TEST(MakeLayer, AllExpertsMayBeChosen) {
  const LayerData d = make_layer(parse_shape("tiny,experts=16,topk=16"), 1, 1, 0);
  EXPECT_EQ(rows_per_expert(d), std::vector<std::int64_t>(16, 64));
}

TEST(MakeLayer, SkewSkews) {
  const auto rows = [](double skew) {
    return rows_per_expert(make_layer(parse_shape("small,tokens=4096"), 1, 1, skew));
  };
  const auto spread = [](const std::vector<std::int64_t>& r) {
    const auto [least, most] = std::minmax_element(r.begin(), r.end());
    return static_cast<double>(*most) / static_cast<double>(std::max<std::int64_t>(*least, 1));
  };
  const auto balanced = rows(0);
  const auto zipf = rows(1);
  EXPECT_LT(spread(balanced), 1.2);
  EXPECT_GT(spread(zipf), 5);
  EXPECT_EQ(std::max_element(zipf.begin(), zipf.end()), zipf.begin()) << "expert 0 has the most";
  EXPECT_GT(spread(rows(2)), spread(zipf));
  EXPECT_EQ(rows(100)[0], 4096) << "every token goes to expert 0";
}

TEST(MakeLayer, Errors) {
  const auto refuse = [](ShapeSpec spec, int ranks, double skew) {
    return io::sentence_of(ErrorCode::kInvalidArgument, [&] { make_layer(spec, ranks, 1, skew); });
  };
  const ShapeSpec tiny = parse_shape("tiny");
  EXPECT_EQ(refuse(tiny, 0, 0), "ranks is 0; 1 to 1024 is accepted");
  EXPECT_EQ(refuse(tiny, 1, -1), "skew is -1; 0 to 100 is accepted");
  EXPECT_EQ(refuse(tiny, 1, std::nan("")), "skew is nan; 0 to 100 is accepted");
  EXPECT_NE(refuse({"own", 1, 7, 8, 1, 1}, 1, 0).find("is out of range"), std::string::npos);
  const ShapeSpec most = parse_shape(
      "custom,tokens=67108864,hidden=1048576,intermediate=1048576,experts=65536,"
      "topk=16");
  EXPECT_GT(layer_bytes(most, 1024), 0) << "no overflow";
  EXPECT_NE(refuse(most, 1024, 0).find("1024 ranks needs 720584736472301568 bytes; up to "),
            std::string::npos);
}

TEST(MakeLayer, SharedExpertsChangeNothingElse) {
  const ShapeSpec plain = parse_shape("tiny,tokens=5");
  ShapeSpec spec = plain;
  spec.shared_experts = 3;
  spec.shared_gate = true;
  const LayerData without = make_layer(plain, 2, 1, 0), with = make_layer(spec, 2, 1, 0);
  EXPECT_EQ(with.w1, without.w1);
  EXPECT_EQ(with.topk_ids, without.topk_ids);
  EXPECT_EQ(with.shared_w1.size(), 3u * 64 * 64);
  EXPECT_EQ(with.shared_w2.size(), 3u * 64 * 32);
  EXPECT_NE(std::vector(with.w1.begin(), with.w1.begin() + 64),
            std::vector(with.shared_w1.begin(), with.shared_w1.begin() + 64));
  EXPECT_EQ(layer_bytes(spec, 2) - layer_bytes(plain, 2), 2 * 3 * 64 * (64 + 32) + 10 * 3 * 4);
  ASSERT_EQ(with.shared_probs.size(), 30u);
  for (const float p : with.shared_probs) EXPECT_TRUE(p > 0 && p < 1) << p;
  // A rank's part, which may begin anywhere.
  EXPECT_EQ(make_shared_probs(spec, 1, 3, 4),
            std::vector(with.shared_probs.begin() + 9, with.shared_probs.begin() + 21));
  spec.shared_gate = false;
  EXPECT_TRUE(make_layer(spec, 2, 1, 0).shared_probs.empty());
}

TEST(Synthetic, SlotsBeyondTheNumberOfExpertsAreDropped) {
  const ShapeSpec spec = parse_shape("custom,tokens=20,hidden=8,intermediate=8,experts=3,topk=5");
  const Routing routing = make_routing(spec, 1, 7, 0);
  for (std::size_t t = 0; t < 20; ++t) {
    const std::set<std::int32_t> chosen(&routing.topk_ids[5 * t], &routing.topk_ids[5 * t + 3]);
    EXPECT_EQ(chosen, (std::set<std::int32_t>{0, 1, 2}));
    float sum = 0;
    for (std::size_t k = 0; k < 5; ++k) {
      sum += routing.topk_probs[5 * t + k];
      if (k < 3) continue;
      EXPECT_EQ(routing.topk_ids[5 * t + k], -1);
      EXPECT_EQ(routing.topk_probs[5 * t + k], 0.0f);
    }
    EXPECT_NEAR(sum, 1, 1e-6);
  }
}

}  // namespace
}  // namespace uniep::workload
