#include <algorithm>
#include <cmath>

#include "cpu/kernels_testing.h"

namespace uniep::cpu {
namespace {

using testing::Values;
using Index = std::int64_t;

constexpr float kPoison = -12345.678f;
constexpr bf16 kPoisonBf16{0x7fc1};  // a NaN: spreads where padding is read as data

/// A matrix with padding between its rows (or columns, if stored transposed), and none at its end,
/// so that AddressSanitizer sees reads past it. `by_turns`: it is the second of two whose elements
/// take turns.
struct Matrix {
  Index rows, cols;
  bool transposed;  // stored [cols, rows]
  Index apart, stride;
  std::vector<bf16> data;

  Matrix(std::mt19937& rng, Values values, Index rows_, Index cols_, bool transposed_,
         Index padding, bool by_turns = false)
      : rows(rows_), cols(cols_), transposed(transposed_), apart(by_turns ? 2 : 1) {
    const Index lines = transposed ? cols : rows, length = transposed ? rows : cols;
    stride = apart * length + padding;
    data.assign(static_cast<std::size_t>(std::max<Index>(0, lines * stride - padding)),
                kPoisonBf16);
    for (Index l = 0; l < lines; ++l) {
      for (Index e = 0; e < length; ++e) {
        data[static_cast<std::size_t>(l * stride + apart * e + apart - 1)] =
            testing::random_bf16(rng, values);
      }
    }
  }
  MatrixView view() const {
    const bf16* first = data.data() + (data.empty() ? 0 : apart - 1);
    return transposed ? MatrixView{first, apart, stride} : MatrixView{first, stride, apart};
  }
  float at(Index i, Index j) const {
    const Index line = transposed ? j : i, element = transposed ? i : j;
    return to_float(data[static_cast<std::size_t>(line * stride + apart * element + apart - 1)]);
  }
};

/// The definition. With `fused` false, what a multiplication and an addition would give.
std::vector<float> naive(const Matrix& a, const Matrix& b, bool fused = true) {
  std::vector<float> c(static_cast<std::size_t>(a.rows * b.cols));
  for (Index i = 0; i < a.rows; ++i) {
    for (Index j = 0; j < b.cols; ++j) {
      float sum = 0;
      for (Index p = 0; p < a.cols; ++p) {
        sum = fused ? std::fma(a.at(i, p), b.at(p, j), sum) : a.at(i, p) * b.at(p, j) + sum;
      }
      c[static_cast<std::size_t>(i * b.cols + j)] = sum;
    }
  }
  return c;
}

/// gemm_tile into the middle of a poisoned buffer; fails where it wrote anything around its tile.
std::vector<float> run(const Kernels& kernels, const Matrix& a, const Matrix& b, Index padding,
                       GemmScratch& scratch) {
  const Index m = a.rows, n = b.cols, guard = 40;
  const Index ldc = std::max<Index>(1, n + padding);
  std::vector<float> buffer(static_cast<std::size_t>(m * ldc + 2 * guard), kPoison);
  gemm_tile(kernels, m, n, a.cols, a.view(), b.view(), buffer.data() + guard, ldc, scratch);
  std::vector<float> c;
  for (Index at = 0; at < static_cast<Index>(buffer.size()); ++at) {
    const float value = buffer[static_cast<std::size_t>(at)];
    const Index row = at < guard ? -1 : (at - guard) / ldc,
                col = at < guard ? 0 : (at - guard) % ldc;
    if (row >= 0 && row < m && col < n) {
      c.push_back(value);
    } else if (value != kPoison) {
      ADD_FAILURE() << kernels.name << " wrote outside of the tile, at row " << row << ", column "
                    << col;
      break;
    }
  }
  return c;
}

struct Layout {
  const char* name;
  bool a_transposed, b_transposed;
  bool b_by_turns = false;
};
constexpr Layout kLayouts[] = {{"NT", false, true},
                               {"NN", false, false},
                               {"TN", true, false},
                               {"TT", true, true},
                               {"NT by turns", false, true, true},
                               {"NN by turns", false, false, true}};

/// What either operand is filled with.
struct Operands {
  Values a = Values::kOrdinary;
  Values b = Values::kOrdinary;

  friend bool operator==(const Operands&, const Operands&) = default;
  bool any_are(Values values) const { return a == values || b == values; }
};

std::string show(const Operands& operands) {
  return std::to_string(static_cast<int>(operands.a)) + " and " +
         std::to_string(static_cast<int>(operands.b));
}

/// Elements of expected results, and how many of them tell more than that a sum vanished,
/// overflowed or became NaN.
struct Content {
  std::size_t elements = 0;
  std::size_t telling = 0;

  void add(const std::vector<float>& want) {
    elements += want.size();
    telling += static_cast<std::size_t>(
        std::ranges::count_if(want, [](float v) { return std::isfinite(v) && v != 0; }));
  }
};

void check(std::mt19937& rng, Operands values, const Layout& layout, Index m, Index n, Index k,
           Index padding, Content* content = nullptr) {
  const Matrix a(rng, values.a, m, k, layout.a_transposed, padding);
  const Matrix b(rng, values.b, k, n, layout.b_transposed, padding, layout.b_by_turns);
  const std::vector<float> want = naive(a, b);
  if (content != nullptr) content->add(want);
  GemmScratch scratch;
  for (const Kernels* kernels : testing::available_kernels()) {
    SCOPED_TRACE(std::string(kernels->name) + " " + layout.name + " m=" + std::to_string(m) +
                 " n=" + std::to_string(n) + " k=" + std::to_string(k) +
                 " padding=" + std::to_string(padding) + " values=" + show(values));
    ASSERT_TRUE(testing::all_same(run(*kernels, a, b, padding, scratch), want));
  }
}

TEST(Gemm, EverySmallShapeAndLayout) {
  std::mt19937 rng(1);
  for (const Layout& layout : kLayouts) {
    for (const Index m : {0, 1, 2, 5, 13, 14, 15, 16, 17, 29}) {
      for (const Index n : {0, 1, 3, 8, 15, 16, 17, 31, 32, 33, 50}) {
        for (const Index k : {0, 1, 2, 7, 31, 32, 33, 65}) {
          check(rng, {}, layout, m, n, k, (m + n + k) % 3 * 5);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

/// Shapes of every layout. Every other one has short sums, in which infinities leave room for
/// numbers.
Content check_random_shapes(std::mt19937& rng, Operands values) {
  const auto up_to = [&](Index most) { return static_cast<Index>(rng() % (most + 1)); };
  const bool overflows =
      values == Operands{Values::kHuge, Values::kHuge} || values.any_are(Values::kAnything);
  Content content;
  for (const Layout& layout : kLayouts) {
    for (int i = 0; i < 6; ++i) {
      const Index m = up_to(70), n = up_to(90);
      const Index k = overflows && i % 2 == 0 ? 1 + up_to(3) : up_to(400);
      check(rng, values, layout, m, n, k, up_to(9), &content);
      if (::testing::Test::HasFatalFailure()) return content;
    }
  }
  return content;
}

/// Also beside ordinary values: two of a kind may only give zeros and infinities, for which bits of
/// the operands do not count.
TEST(Gemm, RandomShapesOfEveryKindOfValue) {
  std::mt19937 rng(2);
  for (const Values kind : testing::kAllValues) {
    for (const Operands values : {Operands{kind, kind}, Operands{kind, Values::kOrdinary},
                                  Operands{Values::kOrdinary, kind}}) {
      const Content content = check_random_shapes(rng, values);
      if (HasFatalFailure()) return;
      // All products of two subnormal numbers vanish: there the signs of zeros are compared.
      if (values == Operands{Values::kSubnormal, Values::kSubnormal}) continue;
      EXPECT_GT(10 * content.telling, content.elements) << "values=" << show(values);
    }
  }
}

TEST(Gemm, LargerThanTheBlocks) {
  std::mt19937 rng(3);
  for (const Layout& layout : kLayouts) {
    check(rng, {}, layout, 201, 20, 521, 3);
    check(rng, {}, layout, 15, 1050, 270, 0);
    check(rng, {Values::kTiny, Values::kTiny}, layout, 201, 530, 20, 0);
  }
}

/// One tile of mixed magnitudes: some pairs of panels need a fused step and some do not.
TEST(Gemm, PanelsOfDifferentMagnitude) {
  std::mt19937 rng(4);
  for (const Layout& layout : kLayouts) {
    Matrix a(rng, Values::kOrdinary, 64, 96, layout.a_transposed, 0);
    const Matrix b(rng, Values::kTiny, 96, 64, layout.b_transposed, 0, layout.b_by_turns);
    for (Index i = 0; i < 64; i += 9) {  // a few rows with tiny elements
      const MatrixView v = a.view();
      a.data[static_cast<std::size_t>(i * v.row_stride + i * v.col_stride)] =
          testing::random_bf16(rng, Values::kTiny);
    }
    const std::vector<float> want = naive(a, b);
    GemmScratch scratch;
    for (const Kernels* kernels : testing::available_kernels()) {
      EXPECT_TRUE(testing::all_same(run(*kernels, a, b, 0, scratch), want)) << kernels->name;
    }
  }
}

/// The exponents of a tile's products sweep over the ends of the range in which fp32 holds them
/// exactly. Odd significands, so that the last bit of a product counts, and two exponents, so that
/// products halfway between two fp32 numbers meet even and odd sums.
TEST(Gemm, EndsOfTheExactRange) {
  std::mt19937 rng(7);
  const auto fill = [&](Matrix& matrix, int exponent, int other) {
    for (bf16& v : matrix.data) {
      const auto bits = static_cast<std::uint32_t>(rng());
      const int chosen = (bits >> 16) % 2 == 0 ? exponent : other;
      v.bits = static_cast<std::uint16_t>((bits & 0x807fu) | 1u |
                                          static_cast<std::uint32_t>(chosen + 127) << 7);
    }
  };
  int seen = 0;
  for (int sum = -152; sum <= 132; sum += sum == -120 ? 240 : 1) {
    Matrix a(rng, Values::kOrdinary, 9, 40, false, 0), b(rng, Values::kOrdinary, 40, 33, false, 0);
    fill(a, sum / 2, sum / 2);
    fill(b, sum - sum / 2, sum - sum / 2 + (sum < 0 ? 1 : -1));
    const std::vector<float> want = naive(a, b);
    seen += !testing::all_same(want, naive(a, b, false));
    GemmScratch scratch;
    for (const Kernels* kernels : testing::available_kernels()) {
      EXPECT_TRUE(testing::all_same(run(*kernels, a, b, 0, scratch), want))
          << kernels->name << " with products of exponent " << sum;
    }
  }
  EXPECT_GE(seen, 10);  // of the exponents tell a fused step from two roundings
}

/// Whether the values above tell a fused step from two roundings at all.
TEST(Gemm, SeparateRoundingsWouldBeSeen) {
  std::mt19937 rng(5);
  for (const Values values : {Values::kTiny, Values::kHuge, Values::kSubnormal}) {
    const Matrix a(rng, values, 20, 40, false, 0), b(rng, values, 40, 20, false, 0);
    EXPECT_FALSE(testing::all_same(naive(a, b, true), naive(a, b, false)))
        << static_cast<int>(values);
  }
}

TEST(Gemm, SplitsOfATileGiveTheSameBits) {
  std::mt19937 rng(6);
  const Index m = 61, n = 77, k = 300;
  const Matrix a(rng, Values::kOrdinary, m, k, false, 0), b(rng, Values::kOrdinary, k, n, true, 0);
  for (const Kernels* kernels : testing::available_kernels()) {
    GemmScratch scratch;
    const std::vector<float> whole = run(*kernels, a, b, 0, scratch);
    std::vector<float> split(whole.size(), kPoison);
    for (Index i = 0; i < m; i += 23) {
      for (Index j = 0; j < n; j += 19) {
        const MatrixView va = a.view(), vb = b.view();
        gemm_tile(*kernels, std::min<Index>(23, m - i), std::min<Index>(19, n - j), k,
                  {va.data + i * va.row_stride, va.row_stride, va.col_stride},
                  {vb.data + j * vb.col_stride, vb.row_stride, vb.col_stride},
                  split.data() + i * n + j, n, scratch);
      }
    }
    EXPECT_TRUE(testing::all_same(split, whole)) << kernels->name;
  }
}

TEST(Gemm, SumsGoOnFromOnePartOfTheReductionToTheNext) {
  std::mt19937 rng(7);
  const Index m = 31, n = 45, k = 600;
  const Matrix a(rng, Values::kOrdinary, m, k, false, 0), b(rng, Values::kOrdinary, k, n, false, 0);
  for (const Kernels* kernels : testing::available_kernels()) {
    GemmScratch scratch;
    const std::vector<float> whole = run(*kernels, a, b, 0, scratch);
    for (const Index first : {Index{0}, Index{8}, Index{300}, k}) {
      std::vector<float> sums(whole.size(), kPoison);
      const MatrixView va = a.view(), vb = b.view();
      gemm_tile(*kernels, m, n, first, va, vb, sums.data(), n, scratch);
      gemm_tile(*kernels, m, n, k - first, {va.data + first, va.row_stride, va.col_stride},
                {vb.data + first * vb.row_stride, vb.row_stride, vb.col_stride}, sums.data(), n,
                scratch, true);
      EXPECT_TRUE(testing::all_same(sums, whole)) << kernels->name << " at " << first;
    }
  }
}

}  // namespace
}  // namespace uniep::cpu
