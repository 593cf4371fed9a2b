#include "io/layer_file.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "base/check.h"
#include "io/io_test_util.h"
#include "io/safetensors.h"
#include "support/states.h"
#include "workload/split.h"
#include "workload/synthetic.h"

namespace uniep::io {
namespace {

using std::filesystem::path;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

path shipped_trace() { return path(UNIEP_DATA_DIR) / "moe_lm_layer.safetensors"; }

/// A small layer as tensors that tests change before they are read. T=3, H=16, I=8, E=4, K=2.
struct Parts {
  LayerData d = workload::make_layer(
      workload::parse_shape("custom,tokens=3,hidden=16,intermediate=8,experts=4,topk=2"), 1, 1, 0);
  std::vector<Tensor> tensors = {make_tensor<bf16>("x", {3, 16}, d.x),
                                 make_tensor<std::int32_t>("topk_ids", {3, 2}, d.topk_ids),
                                 make_tensor<float>("topk_probs", {3, 2}, d.topk_probs),
                                 make_tensor<bf16>("w1", {4, 16, 16}, d.w1),
                                 make_tensor<bf16>("w2", {4, 16, 8}, d.w2),
                                 make_tensor<bf16>("dy", {3, 16}, d.dy)};

  Tensor& at(const std::string& name) {
    return *std::find_if(tensors.begin(), tensors.end(),
                         [&](const Tensor& t) { return t.name == name; });
  }
  void drop(const std::string& name) {
    std::erase_if(tensors, [&](const Tensor& t) { return t.name == name; });
  }
  LayerCheck check() const { return check_layer(serialize_safetensors(tensors), "f"); }
  LayerData parse() const { return parse_layer(serialize_safetensors(tensors), "f"); }

  std::vector<std::string> findings() const {
    const auto found = check().findings;
    const std::string first = io_sentence([&] { parse(); });
    EXPECT_EQ(first.substr(0, found.at(0).size()), found[0]);
    return found;
  }
};

using Sentences = std::vector<std::string>;

void expect_same(const LayerData& a, const LayerData& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.hidden, b.hidden);
  EXPECT_EQ(a.intermediate, b.intermediate);
  EXPECT_EQ(a.num_experts, b.num_experts);
  EXPECT_EQ(a.topk, b.topk);
  EXPECT_EQ(a.x, b.x);
  EXPECT_EQ(a.topk_ids, b.topk_ids);
  EXPECT_EQ(a.topk_probs, b.topk_probs);
  EXPECT_EQ(a.w1, b.w1);
  EXPECT_EQ(a.w2, b.w2);
  EXPECT_EQ(a.dy, b.dy);
}

TEST(LayerFile, TheShippedTraceLoads) {
  const LayerCheck check = check_layer(shipped_trace());
  EXPECT_EQ(check.findings, Sentences{});
  ASSERT_TRUE(check.summary);
  EXPECT_EQ(to_string(*check.summary),
            "T=2048 H=256 I=128 E=32 K=4, with dy\n"
            "8192 rows, per expert 84 to 558, median 244; 0 dropped slots");
  const LayerData d = load_layer(shipped_trace());
  EXPECT_EQ(d.tokens, 2048);
  EXPECT_EQ(d.hidden, 256);
  EXPECT_EQ(d.intermediate, 128);
  EXPECT_EQ(d.num_experts, 32);
  EXPECT_EQ(d.topk, 4);
  EXPECT_EQ(d.x.size(), 2048u * 256);
  EXPECT_EQ(d.w1.size(), 32u * 256 * 256);
  EXPECT_EQ(d.w2.size(), 32u * 256 * 128);
  EXPECT_EQ(d.dy.size(), d.x.size());
}

TEST(LayerFile, TheShippedTraceIsWrittenBackByteForByte) {
  const TemporaryFolder folder;
  save_layer(folder / "copy", load_layer(shipped_trace()));
  EXPECT_TRUE(testing::file_text(folder / "copy") == testing::file_text(shipped_trace()));
}

TEST(LayerFile, RoundTrip) {
  const TemporaryFolder folder;
  const Parts parts;
  save_layer(folder / "a", parts.d);
  expect_same(load_layer(folder / "a"), parts.d);
  expect_same(parts.parse(), parts.d);
}

/// The layer of Parts with another activation, and biases.
LayerData other_layer(Activation activation) {
  workload::ShapeSpec spec =
      workload::parse_shape("custom,tokens=3,hidden=16,intermediate=8,experts=4,topk=2");
  spec.activation = activation;
  spec.bias = true;
  return workload::make_layer(spec, 1, 1, 0);
}

TEST(LayerFile, BiasesAndExpertsWithoutAGate) {
  const TemporaryFolder folder;
  for (const Activation activation : {Activation::kGptOss, Activation::kRelu2}) {
    const LayerData d = other_layer(activation);
    save_layer(folder / "a", d);
    const LayerData read = load_layer(folder / "a", activation);
    expect_same(read, d);
    EXPECT_EQ(read.activation, activation);
    EXPECT_EQ(read.b1, d.b1);
    EXPECT_EQ(read.b2, d.b2);
    EXPECT_EQ(read.b1.size(), activation == Activation::kRelu2 ? 32u : 64u);
    const LayerCheck check = check_layer(folder / "a", activation);
    EXPECT_EQ(check.findings, Sentences{});
    EXPECT_TRUE(
        to_string(*check.summary).starts_with("T=3 H=16 I=8 E=4 K=2, with dy, with biases\n"));
  }
  const Sentences as_gated = check_layer(folder / "a").findings;
  ASSERT_FALSE(as_gated.empty());
  EXPECT_STATES(as_gated[0], cat((folder / "a").string(),
                                 ": I is 4 in tensor 'w1'; a multiple of 8 from 8 to 1048576 is "
                                 "accepted"));
}

TEST(LayerFileErrors, Biases) {
  const TemporaryFolder folder;
  save_layer(folder / "a", other_layer(Activation::kSwiglu));
  const TensorFile file = read_safetensors(folder / "a");
  std::vector<Tensor> tensors = file.tensors;
  const auto find = [&](const char* name) {
    return std::ranges::find(tensors, name, [](const Tensor& t) { return t.name; });
  };
  const std::vector<bf16> few(32), infinite(64, to_bf16(kInf));
  *find("b2") = make_tensor<bf16>("b2", {4, 8}, few);
  Sentences found = check_layer(serialize_safetensors(tensors), "f").findings;
  ASSERT_EQ(found.size(), 1u);
  EXPECT_STATES(found[0],
                "f: tensor 'b2' has shape [4, 8], but H is 16 in tensor 'x'; 16 is needed in "
                "dimension 1");
  *find("b2") = make_tensor<bf16>("b2", {4, 16}, infinite);
  found = check_layer(serialize_safetensors(tensors), "f").findings;
  ASSERT_FALSE(found.empty());
  EXPECT_STATES(found[0], "f: element [0, 0] of 'b2' is infinity; a finite number is needed");
  tensors.erase(find("b2"));
  found = check_layer(serialize_safetensors(tensors), "f").findings;
  ASSERT_EQ(found.size(), 1u);
  EXPECT_STATES(found[0],
                "f: has no tensor 'b2', and one of b1 and b2 alone; both or neither are "
                "accepted");
}

/// The layer of Parts with two shared experts.
LayerData shared_layer(Activation activation, bool gate) {
  workload::ShapeSpec spec =
      workload::parse_shape("custom,tokens=3,hidden=16,intermediate=8,experts=4,topk=2");
  spec.activation = activation;
  spec.shared_experts = 2;
  spec.shared_gate = gate;
  return workload::make_layer(spec, 1, 1, 0);
}

TEST(LayerFile, SharedExperts) {
  const TemporaryFolder folder;
  for (const bool gate : {false, true}) {
    const Activation activation = gate ? Activation::kSwiglu : Activation::kRelu2;
    const LayerData d = shared_layer(activation, gate);
    ASSERT_EQ(d.shared_w1.size(), gate ? 512u : 256u);
    ASSERT_EQ(d.shared_probs.size(), gate ? 6u : 0u);
    save_layer(folder / "a", d);
    const LayerData read = load_layer(folder / "a", activation);
    expect_same(read, d);
    EXPECT_EQ(read.shared_experts, 2);
    EXPECT_EQ(read.shared_w1, d.shared_w1);
    EXPECT_EQ(read.shared_w2, d.shared_w2);
    EXPECT_EQ(read.shared_probs, d.shared_probs);
    const LayerCheck check = check_layer(folder / "a", activation);
    EXPECT_EQ(check.findings, Sentences{});
    EXPECT_TRUE(check.summary->other_tensors.empty());
    EXPECT_TRUE(to_string(*check.summary)
                    .starts_with(cat("T=3 H=16 I=8 E=4 K=2, with dy, S=2 shared experts",
                                     gate ? " with probabilities\n" : "\n")));
  }
}

TEST(LayerFileErrors, SharedExperts) {
  const TemporaryFolder folder;
  save_layer(folder / "a", shared_layer(Activation::kSwiglu, true));
  const auto file = read_safetensors(folder / "a");
  const std::vector<Tensor>& good = file.tensors;
  const auto found = [&](const auto& change) {
    std::vector<Tensor> tensors = good;
    change(tensors);
    return check_layer(serialize_safetensors(tensors), "f").findings;
  };
  const auto place = [](std::vector<Tensor>& tensors, const char* name) {
    return std::ranges::find(tensors, name, [](const Tensor& t) { return t.name; });
  };
  const auto replaced = [&](const char* name, const Tensor& by) {
    return found([&](std::vector<Tensor>& tensors) { *place(tensors, name) = by; });
  };
  const auto erased = [&](const char* name) {
    return found([&](std::vector<Tensor>& tensors) { tensors.erase(place(tensors, name)); });
  };
  const std::vector<bf16> weights(15 * 256), biases(64);
  EXPECT_EQ(erased("shared_probs"), Sentences{});
  const auto expect_one = [](const Sentences& sentences, const std::string& wanted) {
    ASSERT_EQ(sentences.size(), 1u);
    EXPECT_STATES(sentences[0], wanted);
  };
  expect_one(erased("shared_w2"),
             "f: has no tensor 'shared_w2', and one of shared_w1 and shared_w2 alone; both or "
             "neither are accepted");
  expect_one(replaced("shared_w2", make_tensor<bf16>("shared_w2", {2, 16, 16},
                                                     {weights.begin(), weights.begin() + 512})),
             "f: tensor 'shared_w2' has shape [2, 16, 16], but I is 8 in tensor 'w1'; 8 is needed "
             "in dimension 2");
  const std::vector<float> probs = {1, 1, kInf, 1, 1, 1};
  expect_one(replaced("shared_probs", make_tensor<float>("shared_probs", {3, 2}, probs)),
             "f: shared_probs of token 1, shared expert 0 is infinity; a finite number is needed");
  expect_one(found([&](std::vector<Tensor>& tensors) {
               *place(tensors, "shared_w1") = make_tensor<bf16>("shared_w1", {15, 16, 16}, weights);
               *place(tensors, "shared_w2") = make_tensor<bf16>(
                   "shared_w2", {15, 16, 8}, {weights.begin(), weights.begin() + 1920});
               tensors.erase(place(tensors, "shared_probs"));
             }),
             "f: K is 2 and S is 15 in tensor 'shared_w1'; at most 16 together are accepted");
  expect_one(found([&](std::vector<Tensor>& tensors) {
               tensors.push_back(make_tensor<bf16>("b1", {4, 16}, biases));
               tensors.push_back(make_tensor<bf16>("b2", {4, 16}, biases));
             }),
             "f: has biases and shared experts; one of them is accepted");
}

TEST(LayerFile, ProbabilitiesOfNoSharedExpertsAreIgnored) {
  Parts parts;
  parts.tensors.push_back(make_tensor<float>("shared_probs", {0}, {}));
  EXPECT_NE(to_string(*parts.check().summary).find("\nignored: 'shared_probs'"), std::string::npos);
}

TEST(LayerFile, DyMayBeMissing) {
  const TemporaryFolder folder;
  Parts parts;
  parts.drop("dy");
  EXPECT_TRUE(parts.parse().dy.empty());
  EXPECT_FALSE(parts.check().summary->has_dy);
  save_layer(folder / "a", parts.parse());
  EXPECT_EQ(read_safetensors(folder / "a").tensors.size(), 5u);
}

TEST(LayerFile, NoTokensAtAll) {
  const TemporaryFolder folder;
  LayerData d = workload::make_layer(workload::parse_shape("tiny,tokens=0"), 2, 1, 0);
  save_layer(folder / "a", d);
  expect_same(load_layer(folder / "a"), d);
  EXPECT_EQ(check_layer(folder / "a").summary->max_rows, 0);
}

TEST(LayerFile, WideIdsAreNarrowed) {
  Parts parts;
  const std::vector<std::int64_t> wide = {3, -1, 0, 0, 2, 1};
  parts.at("topk_ids") = make_tensor<std::int64_t>("topk_ids", {3, 2}, wide);
  EXPECT_EQ(parts.parse().topk_ids, (std::vector<std::int32_t>{3, -1, 0, 0, 2, 1}));
  const LayerSummary summary = *parts.check().summary;
  EXPECT_EQ(summary.dropped_slots, 1);
  EXPECT_EQ(summary.rows, 5);
  EXPECT_EQ(summary.min_rows, 1);
  EXPECT_EQ(summary.median_rows, 1);
  EXPECT_EQ(summary.max_rows, 2) << "an expert twice in a token is two rows";
}

TEST(LayerFile, WideIdsDoNotWrapAround) {
  Parts parts;
  const std::vector<std::int64_t> wide = {
      0, std::int64_t{1} << 32, 0, (std::int64_t{1} << 33) - 1, 0, 0};
  parts.at("topk_ids") = make_tensor<std::int64_t>("topk_ids", {3, 2}, wide);
  EXPECT_STATES(
      parts.findings(),
      (Sentences{"f: topk_ids of token 0, slot 1 is 4294967296; 0 to 3, or -1 for a dropped "
                 "slot, is accepted",
                 "f: topk_ids of token 1, slot 1 is 8589934591; 0 to 3, or -1 for a dropped "
                 "slot, is accepted"}));
  EXPECT_EQ(parts.check().summary->dropped_slots, 0);
}

TEST(LayerFile, OtherTensorsAreIgnoredAndNamed) {
  Parts parts;
  parts.tensors.push_back(make_tensor<float>("bias", {0}, {}));
  const std::vector<bf16> bytes(1);
  parts.tensors.push_back(make_tensor<bf16>("mask", {1}, bytes));
  parts.tensors.back().dtype = DType::kU8;
  parts.tensors.back().shape = {2};
  expect_same(parts.parse(), parts.d);
  EXPECT_NE(to_string(*parts.check().summary).find("\nignored: 'bias'"), std::string::npos);
}

TEST(LayerFileErrors, WhatTheFormatRefusesIsOneFinding) {
  EXPECT_STATES(check_layer(std::vector<std::byte>{}, "f").findings,
                (Sentences{"f: is empty; a safetensors file is needed"}));
  const LayerCheck missing = check_layer("/no/such/file");
  ASSERT_EQ(missing.findings.size(), 1u);
  EXPECT_NE(missing.findings[0].find("/no/such/file: cannot be opened"), std::string::npos);
  EXPECT_FALSE(missing.summary);
  io_sentence([] { load_layer("/no/such/file"); });
}

TEST(LayerFileErrors, EveryMissingTensorIsNamed) {
  for (const char* name : {"x", "topk_ids", "topk_probs", "w1", "w2"}) {
    Parts parts;
    parts.drop(name);
    EXPECT_STATES(parts.findings(),
                  (Sentences{std::string("f: has no tensor '") + name +
                             "'; x, topk_ids, topk_probs, w1 and w2 are needed"}));
  }
  Parts none;
  none.tensors.clear();
  EXPECT_EQ(none.findings().size(), 5u);
  EXPECT_STATES(
      io_sentence([&] { none.parse(); }),
      "f: has no tensor 'x'; x, topk_ids, topk_probs, w1 and w2 are needed (`uniep validate` "
      "lists 4 more)");
}

TEST(LayerFileErrors, DTypes) {
  const std::vector<float> f(1024);
  const std::vector<double> d(6);
  const auto with = [](const Tensor& tensor) {
    Parts parts;
    parts.at(tensor.name) = tensor;
    return parts.findings();
  };
  const auto floats = [&](const char* name, std::vector<std::int64_t> shape, std::size_t n) {
    return make_tensor<float>(name, std::move(shape), std::span(f).first(n));
  };
  EXPECT_STATES(with(floats("x", {3, 16}, 48)),
                (Sentences{"f: tensor 'x' has dtype F32; BF16 is needed"}));
  EXPECT_STATES(with(floats("topk_ids", {3, 2}, 6)),
                (Sentences{"f: tensor 'topk_ids' has dtype F32; I32 or I64 is needed"}));
  EXPECT_STATES(with(make_tensor<double>("topk_probs", {3, 2}, d)),
                (Sentences{"f: tensor 'topk_probs' has dtype F64; F32 is needed"}));
  EXPECT_STATES(with(floats("w1", {4, 16, 16}, 1024)),
                (Sentences{"f: tensor 'w1' has dtype F32; BF16 is needed"}));
  EXPECT_STATES(with(floats("w2", {4, 16, 8}, 512)),
                (Sentences{"f: tensor 'w2' has dtype F32; BF16 is needed"}));
  EXPECT_STATES(with(floats("dy", {3, 16}, 48)),
                (Sentences{"f: tensor 'dy' has dtype F32; BF16 is needed"}));
}

/// The findings when one tensor has another shape; its values are zeros.
Sentences with_shape(const std::string& name, std::vector<std::int64_t> shape) {
  Parts parts;
  Tensor& tensor = parts.at(name);
  std::size_t bytes = static_cast<std::size_t>(size_of(tensor.dtype));
  for (const std::int64_t size : shape) bytes *= static_cast<std::size_t>(size);
  const std::vector<std::byte> zeros(bytes);
  tensor.shape = std::move(shape);
  tensor.bytes = zeros;
  return parts.findings();
}

TEST(LayerFileErrors, Shapes) {
  EXPECT_STATES(with_shape("x", {48}),
                (Sentences{"f: tensor 'x' has shape [48]; 2 dimensions are needed"}));
  EXPECT_STATES(with_shape("w1", {4, 256}),
                (Sentences{"f: tensor 'w1' has shape [4, 256]; 3 dimensions are needed"}));
  EXPECT_EQ(with_shape("topk_ids", {4, 2})[0],
            "f: tensor 'topk_ids' has shape [4, 2], but T is 3 in tensor 'x'; 3 is needed in "
            "dimension 0");
  EXPECT_STATES(
      with_shape("topk_probs", {3, 3}),
      (Sentences{"f: tensor 'topk_probs' has shape [3, 3], but K is 2 in tensor 'topk_ids'; 2 "
                 "is needed in dimension 1"}));
  EXPECT_STATES(with_shape("w1", {4, 16, 24}),
                (Sentences{"f: tensor 'w1' has shape [4, 16, 24], but H is 16 in tensor 'x'; 16 is "
                           "needed in dimension 2"}));
  EXPECT_STATES(
      with_shape("w1", {4, 17, 16}),
      (Sentences{"f: tensor 'w1' has shape [4, 17, 16], but dimension 1 is 2I; an even number "
                 "is needed"}));
  EXPECT_STATES(with_shape("w2", {5, 16, 16}),
                (Sentences{"f: tensor 'w2' has shape [5, 16, 16], but E is 4 in tensor 'w1'; 4 is "
                           "needed in dimension 0",
                           "f: tensor 'w2' has shape [5, 16, 16], but I is 8 in tensor 'w1'; 8 is "
                           "needed in dimension 2"}));
  EXPECT_STATES(
      with_shape("dy", {3, 8}),
      (Sentences{"f: tensor 'dy' has shape [3, 8], but H is 16 in tensor 'x'; 16 is needed in "
                 "dimension 1"}));
}

TEST(LayerFileErrors, Ranges) {
  const std::string width = "; a multiple of 8 from 8 to 1048576 is accepted";
  EXPECT_EQ(with_shape("x", {3, 12})[0], "f: H is 12 in tensor 'x'" + width);
  EXPECT_EQ(with_shape("x", {3, 0})[0], "f: H is 0 in tensor 'x'" + width);
  EXPECT_EQ(with_shape("x", {0, 1048584})[0], "f: H is 1048584 in tensor 'x'" + width);
  EXPECT_EQ(with_shape("w1", {4, 8, 16})[0], "f: I is 4 in tensor 'w1'" + width);
  EXPECT_EQ(with_shape("w1", {4, 2097168, 0})[0], "f: I is 1048584 in tensor 'w1'" + width);
  EXPECT_EQ(with_shape("w1", {0, 16, 16})[0], "f: E is 0 in tensor 'w1'; 1 to 65536 is accepted");
  EXPECT_EQ(with_shape("w1", {65537, 16, 0})[0],
            "f: E is 65537 in tensor 'w1'; 1 to 65536 is accepted");
  EXPECT_EQ(with_shape("x", {67108865, 0})[0],
            "f: T is 67108865 in tensor 'x'; 0 to 67108864 is accepted");
  EXPECT_EQ(with_shape("topk_ids", {3, 17})[0],
            "f: K is 17 in tensor 'topk_ids'; 1 to 16 is accepted");
  EXPECT_EQ(with_shape("topk_ids", {3, 0})[0],
            "f: K is 0 in tensor 'topk_ids'; 1 to 16 is accepted");
}

TEST(LayerFileErrors, Ids) {
  Parts parts;
  parts.d.topk_ids = {0, 4, -2, 1, -1, 3};
  parts.at("topk_ids").bytes = std::as_bytes(std::span(parts.d.topk_ids));
  const std::string accepted = "; 0 to 3, or -1 for a dropped slot, is accepted";
  EXPECT_STATES(parts.findings(), (Sentences{"f: topk_ids of token 0, slot 1 is 4" + accepted,
                                             "f: topk_ids of token 1, slot 0 is -2" + accepted}));
  EXPECT_EQ(parts.check().summary->rows, 3);
}

TEST(LayerFileErrors, NumbersThatAreNotFinite) {
  Parts parts;
  parts.d.topk_probs[3] = kNan;
  parts.d.topk_probs[4] = -kInf;
  parts.d.x[17] = to_bf16(kInf);
  parts.d.w1[2 * 256 + 3 * 16 + 5] = to_bf16(kNan);
  parts.d.w2[127] = to_bf16(-kInf);
  parts.d.dy[47] = to_bf16(kNan);
  EXPECT_STATES(
      parts.findings(),
      (Sentences{"f: topk_probs of token 1, slot 1 is NaN; a finite number is needed",
                 "f: topk_probs of token 2, slot 0 is -infinity; a finite number is needed",
                 "f: element [1, 1] of 'x' is infinity; a finite number is needed",
                 "f: element [2, 3, 5] of 'w1' is NaN; a finite number is needed",
                 "f: element [0, 15, 7] of 'w2' is -infinity; a finite number is needed",
                 "f: element [2, 15] of 'dy' is NaN; a finite number is needed"}));
}

TEST(LayerFileErrors, NobodyReadsTheProbabilityOfADroppedSlot) {
  Parts parts;
  parts.d.topk_ids[3] = -1;
  parts.d.topk_probs[3] = kNan;
  EXPECT_EQ(parts.check().findings, Sentences{});
}

TEST(LayerFileErrors, ManyBadValuesAreCounted) {
  Parts parts;
  std::fill(parts.d.x.begin(), parts.d.x.end(), to_bf16(kNan));
  const Sentences findings = parts.findings();
  ASSERT_EQ(findings.size(), 11u);
  EXPECT_EQ(findings[10], "f: there are 38 more such values in 'x'");
}

TEST(LayerFileErrors, ManyBadIdsAndProbabilitiesAreCounted) {
  const std::vector<bf16> tokens(8 * 16);
  const std::vector<std::int32_t> ids(16, 99);
  const std::vector<float> probs(16, kNan);
  Parts parts;
  for (const char* name : {"x", "dy"}) parts.at(name) = make_tensor<bf16>(name, {8, 16}, tokens);
  parts.at("topk_ids") = make_tensor<std::int32_t>("topk_ids", {8, 2}, ids);
  parts.at("topk_probs") = make_tensor<float>("topk_probs", {8, 2}, probs);
  const Sentences findings = parts.findings();
  EXPECT_EQ(findings.size(), 22u);
  for (const char* name : {"topk_ids", "topk_probs"}) {
    const std::string more = cat("f: there are 6 more such values in '", name, "'");
    EXPECT_EQ(std::ranges::count(findings, more), 1) << name;
  }
}

TEST(LayerFileErrors, AShapeWithoutBytesMayBeHuge) {
  Parts parts;
  parts.at("x") = make_tensor<bf16>("x", {0, std::int64_t{1} << 60}, {});
  EXPECT_FALSE(parts.findings().empty());
  parts.at("x") = make_tensor<bf16>("x", {std::int64_t{1} << 60, 0}, {});
  EXPECT_FALSE(parts.findings().empty());
}

TEST(LayerFileErrors, ALayerWhoseVectorsDoNotFitIsNotWritten) {
  const TemporaryFolder folder;
  Parts parts;
  parts.d.w2.pop_back();
  EXPECT_STATES(
      sentence_of(ErrorCode::kInvalidArgument, [&] { save_layer(folder / "a", parts.d); }),
      "tensor 'w2' has 511 elements; its shape [4, 16, 8] needs another number");
}

/// A result of zeros for T=3, H=16, I=8, E=4, K=2.
LayerResult whole_result() {
  LayerResult r;
  r.out.resize(48);
  r.dx.resize(48);
  r.dprobs.resize(6);
  r.dw1.resize(1024);
  r.dw2.resize(512);
  return r;
}

Sentences tensors_of(const path& file) {
  Sentences tensors;
  for (const Tensor& t : read_safetensors(file).tensors) {
    tensors.push_back(t.name + " " + std::string(to_string(t.dtype)) + " " + shape_string(t.shape));
  }
  return tensors;
}

TEST(ResultFile, ForwardAndBackward) {
  const TemporaryFolder folder;
  const Parts parts;
  LayerResult r = whole_result();
  r.out[5] = to_bf16(2.5f);
  save_result(folder / "a", r, parts.d);
  EXPECT_EQ(tensors_of(folder / "a"),
            (Sentences{"out BF16 [3, 16]", "dx BF16 [3, 16]", "dprobs F32 [3, 2]",
                       "dw1 BF16 [4, 16, 16]", "dw2 BF16 [4, 16, 8]"}));
  EXPECT_EQ(read_safetensors(folder / "a").get("out").as<bf16>(), r.out);
}

TEST(ResultFile, BiasGradients) {
  const TemporaryFolder folder;
  const LayerData d = other_layer(Activation::kGelu);
  LayerResult r = workload::make_result(d, {});
  save_result(folder / "a", r, d);
  EXPECT_EQ(
      tensors_of(folder / "a"),
      (Sentences{"out BF16 [3, 16]", "dx BF16 [3, 16]", "dprobs F32 [3, 2]", "dw1 BF16 [4, 8, 16]",
                 "dw2 BF16 [4, 16, 8]", "db1 BF16 [4, 8]", "db2 BF16 [4, 16]"}));
  r = workload::make_result(d, {.main_grad = true});
  save_result(folder / "a", r, d);
  EXPECT_EQ(tensors_of(folder / "a").at(5), "db1 F32 [4, 8]");
}

TEST(ResultFile, GradientsOfSharedExpertsHaveAPartForEachRank) {
  const TemporaryFolder folder;
  const LayerData d = shared_layer(Activation::kSwiglu, false);
  save_result(folder / "a", workload::make_result(d, {.ranks = 3}), d);
  Sentences tensors = tensors_of(folder / "a");
  ASSERT_EQ(tensors.size(), 8u);
  EXPECT_EQ(Sentences(tensors.begin() + 5, tensors.end()),
            (Sentences{"dshared_probs F32 [3, 2]", "dshared_w1 BF16 [3, 2, 16, 16]",
                       "dshared_w2 BF16 [3, 2, 16, 8]"}));
  save_result(folder / "a", workload::make_result(d, {.main_grad = true, .ranks = 2}), d);
  EXPECT_EQ(tensors_of(folder / "a").at(6), "dshared_w1 F32 [2, 2, 16, 16]");
  save_result(folder / "a", workload::make_result(d, {.backward = false}), d);
  EXPECT_EQ(tensors_of(folder / "a").size(), 1u);
}

TEST(ResultFile, MainGradAndForwardOnly) {
  const TemporaryFolder folder;
  const Parts parts;
  LayerResult r = whole_result();
  r.main_dw1.assign(1024, 1.5f);
  r.main_dw2.assign(512, 2.5f);
  EXPECT_EQ(
      sentence_of(ErrorCode::kInvalidArgument, [&] { save_result(folder / "a", r, parts.d); }),
      "the result has both 'dw1' and 'main_dw1'; one of them is accepted");
  r.dw1.clear();
  r.dw2.clear();
  save_result(folder / "a", r, parts.d);
  const Sentences tensors = tensors_of(folder / "a");
  EXPECT_EQ(tensors.at(3), "dw1 F32 [4, 16, 16]");
  EXPECT_EQ(tensors.at(4), "dw2 F32 [4, 16, 8]");
  EXPECT_EQ(read_safetensors(folder / "a").get("dw2").as<float>(), r.main_dw2);

  LayerResult forward;
  forward.out = r.out;
  save_result(folder / "a", forward, parts.d);
  EXPECT_EQ(tensors_of(folder / "a"), Sentences{"out BF16 [3, 16]"});
}

TEST(ResultFile, AnIncompleteResultIsNotWritten) {
  const TemporaryFolder folder;
  const Parts parts;
  LayerResult r = whole_result();
  r.dprobs.clear();
  EXPECT_EQ(
      sentence_of(ErrorCode::kInvalidArgument, [&] { save_result(folder / "a", r, parts.d); }),
      "tensor 'dprobs' has 0 elements; its shape [3, 2] needs another number");
}

}  // namespace
}  // namespace uniep::io
