#include "reference/contract.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/activation_math.h"
#include "reference/compare.h"
#include "reference/exact.h"
#include "reference/random_layer.h"
#include "support/expect_error.h"

namespace uniep::reference {
namespace {

void expect_same(const LayerResult& got, const LayerResult& want) {
  EXPECT_EQ(first_difference(got.out, want.out).count, 0);
  EXPECT_EQ(first_difference(got.dx, want.dx).count, 0);
  EXPECT_EQ(first_difference(got.dprobs, want.dprobs).count, 0);
  EXPECT_EQ(first_difference(got.dw1, want.dw1).count, 0);
  EXPECT_EQ(first_difference(got.dw2, want.dw2).count, 0);
}

// ---- The contract once more, element by element and row by row, sharing nothing with
// src/reference.

// Ascending over `size`, one accumulator from +0, a fused multiply-add per step.
template <class A, class B>
float dot(std::int64_t size, A a, B b) {
  float acc = 0;
  for (std::int64_t i = 0; i < size; ++i) acc = std::fma(a(i), b(i), acc);
  return acc;
}

float rounded(float v) { return to_float(to_bf16(v)); }

// dprobs of one row: 64 columns at a time; lane l has columns l, l + 16, l + 32, l + 48.
float sum_of_groups(std::vector<float> terms) {
  terms.resize((terms.size() + 63) / 64 * 64, 0.0f);
  float sum = 0;
  for (std::size_t g = 0; g < terms.size(); g += 64) {
    const auto lane = [&](std::size_t l) {
      const float* t = &terms[g + l];
      return ((t[0] + t[16]) + t[32]) + t[48];
    };
    const auto by8 = [&](std::size_t l) { return lane(l) + lane(l + 8); };
    const auto by4 = [&](std::size_t l) { return by8(l) + by8(l + 4); };
    const auto by2 = [&](std::size_t l) { return by4(l) + by4(l + 2); };
    sum += by2(0) + by2(1);
  }
  return sum;
}

class ByElement {
 public:
  explicit ByElement(const LayerData& layer) : d_(layer), h_(d_.hidden), i_(d_.intermediate) {
    for (std::int64_t slot = 0; slot < d_.tokens * d_.topk; ++slot) add_row(slot);
  }

  LayerResult result() const {
    LayerResult r;
    for (std::int64_t t = 0; t < d_.tokens; ++t) {
      for (std::int64_t c = 0; c < h_; ++c) {
        r.out.push_back(to_bf16(over_k(t, [&](const Row& row) { return row.y[at(c)]; })));
        r.dx.push_back(to_bf16(over_k(t, [&](const Row& row) { return row.dx[at(c)]; })));
      }
    }
    for (const Row& row : rows_) r.dprobs.push_back(row.dp);
    for (std::int32_t e = 0; e < d_.num_experts; ++e) {
      for (std::int64_t m = 0; m < 2 * i_; ++m) {
        for (std::int64_t c = 0; c < h_; ++c) {
          r.dw1.push_back(to_bf16(over_rows(
              e, [&](const Row& row) { return row.dh[at(m)]; },
              [&](const Row& row) { return to_float(d_.x[at(row.token * h_ + c)]); })));
        }
      }
      for (std::int64_t c = 0; c < h_; ++c) {
        for (std::int64_t m = 0; m < i_; ++m) {
          r.dw2.push_back(to_bf16(over_rows(
              e, [&](const Row& row) { return to_float(d_.dy[at(row.token * h_ + c)]); },
              [&](const Row& row) { return row.a[at(m)]; })));
        }
      }
    }
    return r;
  }

 private:
  struct Row {
    std::int64_t token;
    std::int32_t expert;
    float dp = 0;
    std::vector<float> h, a, y, da, dh, dx;
  };

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  void add_row(std::int64_t slot) {
    Row row{.token = slot / d_.topk,
            .expert = d_.topk_ids[at(slot)],
            .h = {},
            .a = {},
            .y = {},
            .da = {},
            .dh = {},
            .dx = {}};
    if (row.expert >= 0) compute(row, d_.topk_probs[at(slot)]);
    rows_.push_back(std::move(row));
  }

  void compute(Row& row, float p) {
    const std::int64_t e = row.expert;
    const auto w1 = [&](std::int64_t m, std::int64_t c) {
      return to_float(d_.w1[at((e * 2 * i_ + m) * h_ + c)]);
    };
    const auto w2 = [&](std::int64_t c, std::int64_t m) {
      return to_float(d_.w2[at((e * h_ + c) * i_ + m)]);
    };
    const auto x = [&](std::int64_t c) { return to_float(d_.x[at(row.token * h_ + c)]); };
    const auto dy = [&](std::int64_t c) { return to_float(d_.dy[at(row.token * h_ + c)]); };
    const auto gate = [&](std::int64_t m) { return row.h[at(m)]; };
    const auto up = [&](std::int64_t m) { return row.h[at(i_ + m)]; };

    for (std::int64_t m = 0; m < 2 * i_; ++m) {
      row.h.push_back(rounded(dot(
          h_, [&](auto c) { return w1(m, c); }, x)));
    }
    for (std::int64_t m = 0; m < i_; ++m) {
      row.a.push_back(rounded(p * (silu(gate(m)) * up(m))));
      row.da.push_back(rounded(dot(
          h_, [&](auto c) { return w2(c, m); }, dy)));
    }
    for (std::int64_t m = 0; m < i_; ++m) {
      row.dh.push_back(rounded(((p * row.da[at(m)]) * up(m)) * silu_grad(gate(m))));
    }
    std::vector<float> terms;
    for (std::int64_t m = 0; m < i_; ++m) {
      row.dh.push_back(rounded((p * row.da[at(m)]) * silu(gate(m))));
      terms.push_back(row.da[at(m)] * (silu(gate(m)) * up(m)));
    }
    row.dp = sum_of_groups(terms);
    for (std::int64_t c = 0; c < h_; ++c) {
      row.y.push_back(rounded(dot(
          i_, [&](auto m) { return w2(c, m); }, [&](auto m) { return row.a[at(m)]; })));
      row.dx.push_back(rounded(dot(
          2 * i_, [&](auto m) { return w1(m, c); }, [&](auto m) { return row.dh[at(m)]; })));
    }
  }

  template <class F>
  float over_k(std::int64_t t, F value) const {
    float sum = 0;
    for (std::int64_t slot = t * d_.topk; slot < (t + 1) * d_.topk; ++slot) {
      if (rows_[at(slot)].expert >= 0) sum += value(rows_[at(slot)]);
    }
    return sum;
  }

  template <class A, class B>
  float over_rows(std::int32_t expert, A a, B b) const {
    float acc = 0;
    for (const Row& row : rows_) {
      if (row.expert == expert) acc = std::fma(a(row), b(row), acc);
    }
    return acc;
  }

  const LayerData& d_;
  std::int64_t h_;
  std::int64_t i_;
  std::vector<Row> rows_;  // one per slot, dropped ones too: (token, k) ascending
};

TEST(Contract, EqualsItsFormulasElementByElement) {
  for (const std::int64_t intermediate : {8, 24, 64, 136}) {
    const auto layer = make_layer({.tokens = 30,
                                   .hidden = 40,
                                   .intermediate = intermediate,
                                   .topk = 3,
                                   .dropped = 0.2,
                                   .idle_expert = 1,
                                   .seed = 11});
    expect_same(contract(layer), ByElement(layer).result());
  }
}

// ---- Distance from exact.

void expect_rounded(const char* tensor, const std::vector<double>& got,
                    const std::vector<double>& want) {
  const double error = relative_l2(got, want);
  EXPECT_LT(error, 1e-2) << tensor;
  EXPECT_GT(error, 1e-4) << tensor;
}

TEST(Contract, RoundsButLiesNearTheExactResult) {
  for (unsigned seed = 1; seed <= 4; ++seed) {
    const auto layer = make_layer(
        {.tokens = 64, .hidden = 48, .intermediate = 40, .topk = 3, .dropped = 0.1, .seed = seed});
    const auto got = contract(layer);
    const auto want = exact(layer);
    expect_rounded("out", to_double(got.out), want.out);
    expect_rounded("dx", to_double(got.dx), want.dx);
    expect_rounded("dprobs", to_double(got.dprobs), want.dprobs);
    expect_rounded("dw1", to_double(got.dw1), want.dw1);
    expect_rounded("dw2", to_double(got.dw2), want.dw2);
  }
}

// ---- What may not change a bit.

// Expert e of the result is expert num_experts - 1 - e of `tensor`.
std::vector<bf16> experts_reversed(const std::vector<bf16>& tensor, int num_experts) {
  const auto size = static_cast<std::ptrdiff_t>(tensor.size()) / num_experts;
  std::vector<bf16> reversed;
  for (int e = num_experts - 1; e >= 0; --e) {
    reversed.insert(reversed.end(), tensor.begin() + e * size, tensor.begin() + (e + 1) * size);
  }
  return reversed;
}

TEST(Contract, RenamingExpertsRenamesWeightGradientsAndNothingElse) {
  const auto layer = make_layer({.tokens = 40,
                                 .hidden = 24,
                                 .intermediate = 16,
                                 .num_experts = 5,
                                 .topk = 3,
                                 .dropped = 0.2,
                                 .seed = 21});
  auto renamed = layer;
  for (std::int32_t& id : renamed.topk_ids) id = id < 0 ? id : 4 - id;
  renamed.w1 = experts_reversed(layer.w1, 5);
  renamed.w2 = experts_reversed(layer.w2, 5);
  auto got = contract(renamed);
  got.dw1 = experts_reversed(got.dw1, 5);
  got.dw2 = experts_reversed(got.dw2, 5);
  expect_same(got, contract(layer));
}

TEST(Contract, ATokenDoesNotDependOnTheOthers) {
  const auto layer = make_layer({.tokens = 40, .hidden = 24, .intermediate = 16, .seed = 22});
  auto first = layer;
  first.tokens = 13;
  first.x.resize(13 * 24);
  first.dy.resize(13 * 24);
  first.topk_ids.resize(13 * 2);
  first.topk_probs.resize(13 * 2);
  auto want = contract(layer);
  want.out.resize(13 * 24);
  want.dx.resize(13 * 24);
  want.dprobs.resize(13 * 2);
  const auto got = contract(first);
  EXPECT_EQ(first_difference(got.out, want.out).count, 0);
  EXPECT_EQ(first_difference(got.dx, want.dx).count, 0);
  EXPECT_EQ(first_difference(got.dprobs, want.dprobs).count, 0);
}

TEST(Contract, AppendingADroppedSlotChangesNothing) {
  const auto layer = make_layer({.tokens = 20, .hidden = 24, .intermediate = 16, .topk = 1});
  auto padded = layer;
  padded.topk = 2;
  padded.topk_ids.clear();
  padded.topk_probs.clear();
  for (std::size_t t = 0; t < 20; ++t) {
    padded.topk_ids.insert(padded.topk_ids.end(), {-1, layer.topk_ids[t]});
    padded.topk_probs.insert(padded.topk_probs.end(), {0.5f, layer.topk_probs[t]});
  }
  const auto want = contract(layer);
  const auto got = contract(padded);
  EXPECT_EQ(first_difference(got.out, want.out).count, 0);
  EXPECT_EQ(first_difference(got.dx, want.dx).count, 0);
  EXPECT_EQ(first_difference(got.dw1, want.dw1).count, 0);
  EXPECT_EQ(first_difference(got.dw2, want.dw2).count, 0);
  for (std::size_t t = 0; t < 20; ++t) {
    EXPECT_EQ(got.dprobs[2 * t], 0);
    EXPECT_EQ(got.dprobs[2 * t + 1], want.dprobs[t]);
  }
}

TEST(Contract, NoTokensAndNoValidSlots) {
  const auto none = contract(make_layer({.tokens = 0}));
  EXPECT_TRUE(none.out.empty());
  EXPECT_EQ(none.dw1, std::vector<bf16>(4 * 8 * 6));
  const auto dropped = contract(make_layer({.dropped = 1}));
  EXPECT_EQ(dropped.out, std::vector<bf16>(7 * 6));
  EXPECT_EQ(dropped.dx, std::vector<bf16>(7 * 6));
  EXPECT_EQ(dropped.dw2, std::vector<bf16>(4 * 6 * 4));
}

// ---- Main gradients.

TEST(ContractIntoMainGrad, AddsTheSumThatDwRounds) {
  const auto layer = make_layer({.tokens = 30, .idle_expert = 2});
  const auto rounded_result = contract(layer);
  const auto from_zero = contract_into_main_grad(layer, std::vector<float>(layer.w1.size()),
                                                 std::vector<float>(layer.w2.size()));
  EXPECT_TRUE(from_zero.dw1.empty());
  for (std::size_t i = 0; i < layer.w1.size(); ++i) {
    EXPECT_EQ(to_bf16(from_zero.main_dw1[i]), rounded_result.dw1[i]);
  }
  const auto again =
      contract_into_main_grad(layer, std::vector<float>(layer.w1.size(), 0.3f), from_zero.main_dw2);
  for (std::size_t i = 0; i < layer.w1.size(); ++i) {
    EXPECT_EQ(again.main_dw1[i], 0.3f + from_zero.main_dw1[i]);
  }
  for (std::size_t i = 0; i < layer.w2.size(); ++i) {
    EXPECT_EQ(again.main_dw2[i], 2 * from_zero.main_dw2[i]);
  }
  EXPECT_EQ(first_difference(again.dprobs, rounded_result.dprobs).count, 0);
}

TEST(ContractIntoMainGrad, LeavesExpertsWithoutRowsAlone) {
  const auto layer = make_layer({.idle_expert = 3});
  const std::vector<float> main_dw1(layer.w1.size(), -0.0f);
  const std::vector<float> main_dw2(layer.w2.size(), -0.0f);
  const auto got = contract_into_main_grad(layer, main_dw1, main_dw2);
  const auto negative_zeros = [](const std::vector<float>& tensor) {  // in the last quarter
    return std::count_if(tensor.end() - static_cast<std::ptrdiff_t>(tensor.size() / 4),
                         tensor.end(), [](float v) { return v == 0 && std::signbit(v); });
  };
  EXPECT_EQ(negative_zeros(got.main_dw1), 2 * 4 * 6);
  EXPECT_EQ(negative_zeros(got.main_dw2), 6 * 4);
}

TEST(ContractIntoMainGrad, RefusesOtherSizes) {
  const auto layer = make_layer({});
  const std::vector<float> main_dw1(layer.w1.size()), main_dw2(layer.w2.size());
  uniep::testing::expect_invalid(
      "main gradients of 0 and 96 elements; those of w1 and w2 have 192 and 96",
      [&] { contract_into_main_grad(layer, {}, main_dw2); });
  uniep::testing::expect_invalid(
      "main gradients of 192 and 0 elements; those of w1 and w2 have 192 and 96",
      [&] { contract_into_main_grad(layer, main_dw1, {}); });
}

TEST(ContractIntoBf16MainGrad, RoundsOldValueAndSumTogether) {
  const auto layer = make_layer({.tokens = 30, .idle_expert = 2});
  const auto sums = contract_into_main_grad(layer, std::vector<float>(layer.w1.size()),
                                            std::vector<float>(layer.w2.size()));
  const bf16 old = to_bf16(0.3f);
  const auto got = contract_into_bf16_main_grad(layer, std::vector<bf16>(layer.w1.size(), old),
                                                std::vector<bf16>(layer.w2.size(), old));
  EXPECT_TRUE(got.main_dw1.empty());
  int rounded_twice = 0;  // would be another number
  for (std::size_t i = 0; i < layer.w1.size(); ++i) {
    const float sum = sums.main_dw1[i];
    EXPECT_EQ(got.dw1[i], to_bf16(to_float(old) + sum));
    rounded_twice += to_bf16(to_float(old) + to_float(to_bf16(sum))) != got.dw1[i] ? 1 : 0;
  }
  EXPECT_GT(rounded_twice, 0);
  for (std::size_t i = 0; i < layer.w2.size(); ++i) {
    EXPECT_EQ(got.dw2[i], to_bf16(to_float(old) + sums.main_dw2[i]));
  }
}

TEST(ContractIntoBf16MainGrad, LeavesExpertsWithoutRowsAlone) {
  const auto layer = make_layer({.idle_expert = 3});
  const bf16 odd{0x8000};  // -0, which +0 would change
  const auto got = contract_into_bf16_main_grad(layer, std::vector<bf16>(layer.w1.size(), odd),
                                                std::vector<bf16>(layer.w2.size(), odd));
  const auto kept = [&](const std::vector<bf16>& tensor) {  // in the last quarter
    return std::count(tensor.end() - static_cast<std::ptrdiff_t>(tensor.size() / 4), tensor.end(),
                      odd);
  };
  EXPECT_EQ(kept(got.dw1), 2 * 4 * 6);
  EXPECT_EQ(kept(got.dw2), 6 * 4);
}

}  // namespace
}  // namespace uniep::reference
