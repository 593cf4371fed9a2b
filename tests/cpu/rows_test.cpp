#include <algorithm>
#include <bit>
#include <cmath>

#include "base/activation.h"
#include "base/check.h"
#include "base/contract.h"
#include "base/math.h"
#include "cpu/kernels_testing.h"
#include "support/activations.h"

namespace uniep::cpu {
namespace {

using testing::Values;
using Index = std::int64_t;

constexpr Index kSizes[] = {0, 1, 7, 15, 16, 17, 31, 63, 64, 65, 100, 128, 129, 777};
constexpr Index kGuard = 70;

float rounded(float v) { return to_float(to_bf16(v)); }

/// An output row between guards.
template <class T>
struct Output {
  explicit Output(Index n, T poison_) : poison(poison_), count(n) {
    buffer.assign(static_cast<std::size_t>(n + 2 * kGuard), poison);
  }
  T* data() { return buffer.data() + kGuard; }
  std::vector<T> row() const { return {buffer.begin() + kGuard, buffer.begin() + kGuard + count}; }
  bool guards_intact() const {
    const auto intact = [&](const T& v) { return v == poison; };
    return std::all_of(buffer.begin(), buffer.begin() + kGuard, intact) &&
           std::all_of(buffer.end() - kGuard, buffer.end(), intact);
  }
  T poison;
  Index count;
  std::vector<T> buffer;
};
using BfOutput = Output<bf16>;
using FloatOutput = Output<float>;
constexpr bf16 kBehindRowsBf16{0x4321};
constexpr float kBehindRows = -12345.678f;

std::vector<float> random_floats(std::mt19937& rng, Values values, Index n) {
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& e : v) e = testing::random_float(rng, values);
  return v;
}
std::vector<bf16> random_bf16s(std::mt19937& rng, Values values, Index n) {
  std::vector<bf16> v(static_cast<std::size_t>(n));
  for (bf16& e : v) e = testing::random_bf16(rng, values);
  return v;
}

using uniep::testing::kActivations;

/// f of one element, in the order of docs/numerics.md.
float function_of(Activation activation, float gate, float up) {
  const float of_gate = gate_at(activation, gate).value;
  return is_gated(activation) ? of_gate * up_at(activation, up).value : of_gate;
}

void check_forward(Activation activation, const std::vector<float>& gate,
                   const std::vector<float>& up, float prob) {
  const auto n = static_cast<Index>(gate.size());
  const bool gated = is_gated(activation);
  std::vector<bf16> hg, hu, a;
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const float g = rounded(gate[i]), u = rounded(up[i]);
    hg.push_back(to_bf16(g));
    hu.push_back(gated ? to_bf16(u) : kBehindRowsBf16);
    a.push_back(to_bf16(prob * function_of(activation, g, u)));
  }
  for (const Kernels* kernels : testing::available_kernels()) {
    SCOPED_TRACE(cat(kernels->name, ' ', name(activation), " n=", n));
    BfOutput got_hg(n, kBehindRowsBf16), got_hu(n, kBehindRowsBf16), got_a(n, kBehindRowsBf16);
    kernels->of(activation)
        .forward(n, gate.data(), gated ? up.data() : nullptr, prob, got_hg.data(), got_hu.data(),
                 got_a.data());
    ASSERT_TRUE(testing::all_same(got_hg.row(), hg));
    ASSERT_TRUE(testing::all_same(got_hu.row(), hu));
    ASSERT_TRUE(testing::all_same(got_a.row(), a));
    ASSERT_TRUE(got_hg.guards_intact() && got_hu.guards_intact() && got_a.guards_intact());
  }
}

TEST(Rows, Forward) {
  for (const Activation activation : kActivations) {
    std::mt19937 rng(1);
    for (const Values values : testing::kAllValues) {
      for (const Index n : kSizes) {
        check_forward(activation, random_floats(rng, values, n), random_floats(rng, values, n),
                      0.2718f);
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// h is bf16, so the activation has only 65536 arguments.
TEST(Rows, ForwardOfEveryGate) {
  std::vector<float> gate, up;
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    gate.push_back(to_float({static_cast<std::uint16_t>(bits)}));
    up.push_back(1.5f);
  }
  for (const Activation activation : kActivations) check_forward(activation, gate, up, 1.0f);
}

/// The contract's order, written without a thought for vectors.
float group_sum(const float* v, Index count) {
  float lane[kDprobLanes];
  for (Index l = 0; l < kDprobLanes; ++l) {
    lane[l] = 0;
    for (Index i = l; i < kDprobGroup; i += kDprobLanes) lane[l] += i < count ? v[i] : 0.0f;
  }
  for (const Index distance : {8, 4, 2, 1}) {
    for (Index l = 0; l < distance; ++l) lane[l] = lane[l] + lane[l + distance];
  }
  return lane[0];
}

void check_backward(Activation activation, const std::vector<float>& da_acc,
                    const std::vector<bf16>& hg, const std::vector<bf16>& hu, float prob) {
  const auto n = static_cast<Index>(hg.size());
  const bool gated = is_gated(activation);
  std::vector<bf16> dhg, dhu, a;
  std::vector<float> terms, dprob;
  for (std::size_t i = 0; i < hg.size(); ++i) {
    const float da = rounded(da_acc[i]), g = to_float(hg[i]), u = to_float(hu[i]);
    const ValueSlope gate = gate_at(activation, g), up = up_at(activation, u);
    const float scaled = prob * da;
    const float times_up = gated ? scaled * up.value : scaled;
    const float times_gate = scaled * gate.value;
    dhg.push_back(to_bf16(times_up * gate.slope));
    dhu.push_back(gated ? to_bf16(times_gate * up.slope) : kBehindRowsBf16);
    a.push_back(to_bf16(prob * function_of(activation, g, u)));
    terms.push_back(da * function_of(activation, g, u));
  }
  for (Index begin = 0; begin < n; begin += kDprobGroup) {
    dprob.push_back(group_sum(terms.data() + begin, min_of(kDprobGroup, n - begin)));
  }
  for (const Kernels* kernels : testing::available_kernels()) {
    SCOPED_TRACE(cat(kernels->name, ' ', name(activation), " n=", n));
    BfOutput got_dhg(n, kBehindRowsBf16), got_dhu(n, kBehindRowsBf16), got_a(n, kBehindRowsBf16);
    FloatOutput got_dprob(static_cast<Index>(dprob.size()), kBehindRows);
    kernels->of(activation)
        .backward(n, da_acc.data(), hg.data(), gated ? hu.data() : nullptr, prob, got_dhg.data(),
                  got_dhu.data(), got_a.data(), got_dprob.data());
    ASSERT_TRUE(testing::all_same(got_dhg.row(), dhg));
    ASSERT_TRUE(testing::all_same(got_dhu.row(), dhu));
    ASSERT_TRUE(testing::all_same(got_a.row(), a));
    ASSERT_TRUE(testing::all_same(got_dprob.row(), dprob));
    ASSERT_TRUE(got_dhg.guards_intact() && got_dhu.guards_intact() && got_a.guards_intact() &&
                got_dprob.guards_intact());
  }
}

TEST(Rows, Backward) {
  for (const Activation activation : kActivations) {
    std::mt19937 rng(2);
    for (const Values values : testing::kAllValues) {
      for (const Index n : kSizes) {
        check_backward(activation, random_floats(rng, values, n), random_bf16s(rng, values, n),
                       random_bf16s(rng, values, n), 0.3141f);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Rows, BackwardOfEveryGate) {
  std::mt19937 rng(3);
  std::vector<bf16> gate;
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    gate.push_back({static_cast<std::uint16_t>(bits)});
  }
  const std::vector<float> da = random_floats(rng, Values::kOrdinary, 0x10000);
  const std::vector<bf16> up = random_bf16s(rng, Values::kOrdinary, 0x10000);
  for (const Activation activation : kActivations) check_backward(activation, da, gate, up, 0.75f);
}

/// What biases and probabilities behind fc2 ask for.
TEST(Rows, ScaledRows) {
  constexpr float kFactor = 0.3141f;
  std::mt19937 rng(5);
  for (const Values values : testing::kAllValues) {
    for (const Index n : kSizes) {
      const std::vector<float> base = random_floats(rng, values, n);
      const std::vector<bf16> x = random_bf16s(rng, values, n), y = random_bf16s(rng, values, n);
      std::vector<float> sums, biased, terms;
      std::vector<bf16> scaled;
      for (std::size_t i = 0; i < base.size(); ++i) {
        const float product = kFactor * to_float(x[i]);
        sums.push_back(base[i] + product);
        biased.push_back(rounded(base[i]) + product);
        scaled.push_back(to_bf16(product));
        terms.push_back(to_float(x[i]) * to_float(y[i]));
      }
      float dot = 0;
      for (Index begin = 0; begin < n; begin += kDprobGroup) {
        dot += group_sum(terms.data() + begin, min_of(kDprobGroup, n - begin));
      }
      for (const Kernels* kernels : testing::available_kernels()) {
        SCOPED_TRACE(cat(kernels->name, " n=", n));
        FloatOutput got_sums(n, kBehindRows), got_biased(n, kBehindRows);
        BfOutput got_scaled(n, kBehindRowsBf16);
        std::copy(base.begin(), base.end(), got_sums.data());
        std::copy(base.begin(), base.end(), got_biased.data());
        kernels->add_scaled_row(n, got_sums.data(), x.data(), kFactor);
        kernels->add_bias_row(n, got_biased.data(), x.data(), kFactor);
        kernels->scale_row(n, x.data(), kFactor, got_scaled.data());
        ASSERT_TRUE(testing::all_same(got_sums.row(), sums));
        ASSERT_TRUE(testing::all_same(got_biased.row(), biased));
        ASSERT_TRUE(testing::all_same(got_scaled.row(), scaled));
        ASSERT_TRUE(testing::same(kernels->dot_row(n, x.data(), y.data()), dot));
        ASSERT_TRUE(got_sums.guards_intact() && got_biased.guards_intact() &&
                    got_scaled.guards_intact());
      }
    }
  }
}

/// Rounding is done on bits, so here even NaNs must agree exactly.
TEST(Rows, RoundRowOfEveryUpperHalf) {
  std::vector<float> acc;
  std::vector<bf16> want;
  for (std::uint32_t upper = 0; upper < 0x10000u; ++upper) {
    for (const std::uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      acc.push_back(std::bit_cast<float>(upper << 16 | lower));
      want.push_back(to_bf16(acc.back()));
    }
  }
  for (const Kernels* kernels : testing::available_kernels()) {
    for (const Index n : {Index{1}, Index{17}, Index{100}, static_cast<Index>(acc.size())}) {
      BfOutput got(n, kBehindRowsBf16);
      kernels->round_row(n, acc.data(), got.data());
      const std::vector<bf16> row = got.row();
      EXPECT_TRUE(std::equal(row.begin(), row.end(), want.begin())) << kernels->name;
      EXPECT_TRUE(got.guards_intact()) << kernels->name;
    }
  }
}

TEST(Rows, AddRows) {
  std::mt19937 rng(4);
  for (const Values values : testing::kAllValues) {
    for (const Index n : kSizes) {
      const std::vector<float> base = random_floats(rng, values, n);
      const std::vector<float> more = random_floats(rng, values, n);
      const std::vector<bf16> y = random_bf16s(rng, values, n);
      std::vector<float> plus_y, plus_more;
      std::vector<bf16> rounded;
      for (std::size_t i = 0; i < base.size(); ++i) {
        plus_y.push_back(base[i] + to_float(y[i]));
        plus_more.push_back(base[i] + more[i]);
        rounded.push_back(to_bf16(to_float(y[i]) + more[i]));
      }
      for (const Kernels* kernels : testing::available_kernels()) {
        FloatOutput got_y(n, kBehindRows), got_more(n, kBehindRows);
        std::copy(base.begin(), base.end(), got_y.data());
        std::copy(base.begin(), base.end(), got_more.data());
        kernels->add_row(n, got_y.data(), y.data());
        kernels->add_f32_row(n, got_more.data(), more.data());
        BfOutput got_rounded(n, kBehindRowsBf16);
        std::copy(y.begin(), y.end(), got_rounded.data());
        kernels->add_bf16_row(n, got_rounded.data(), more.data());
        EXPECT_TRUE(testing::all_same(got_rounded.row(), rounded)) << kernels->name;
        EXPECT_TRUE(got_rounded.guards_intact()) << kernels->name;
        EXPECT_TRUE(testing::all_same(got_y.row(), plus_y)) << kernels->name;
        EXPECT_TRUE(testing::all_same(got_more.row(), plus_more)) << kernels->name;
        EXPECT_TRUE(got_y.guards_intact() && got_more.guards_intact()) << kernels->name;
      }
    }
  }
}

}  // namespace
}  // namespace uniep::cpu
