// The matrix product, included by kernels_<isa>.cpp after it has defined `Simd`. No #pragma once
// and no functions with external linkage: everything is compiled once per instruction set, and a
// function that these translation units shared with others (even an inline one of a header, such as
// to_bf16) could end up in generic code with AVX-512 instructions in it.
//
// Simd has: kWidth floats per vector F and as many uint32 per vector U; kRows, the height of the
// register tile; fma(a, b, c), exact; kNativeFma, whether that is one instruction; transpose(U*).
#include <utility>

namespace uniep::cpu {
namespace {

using Index = std::int64_t;
constexpr int kWidth = Simd::kWidth;
constexpr int kRows = Simd::kRows;
constexpr int kCols = 2 * kWidth;  // width of the register tile

// What is packed at a time. A panel of a (kRows x kBlockK) and one of b (kBlockK x kCols) stay in
// the L1 cache, the packed blocks in L2.
constexpr Index kBlockM = 192;
constexpr Index kBlockN = 512;
constexpr Index kBlockK = 256;

// Stores of whole vectors run over the end of a panel of a by less than one vector.
constexpr Index kPanelSlack = kWidth;

typedef float FMem __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef std::uint32_t UMem __attribute__((vector_size(kWidth * 4), aligned(2), may_alias));
typedef std::uint16_t HMem __attribute__((vector_size(kWidth * 2), aligned(2), may_alias));

constexpr Index smaller(Index x, Index y) { return x < y ? x : y; }
constexpr Index pieces(Index total, Index most) { return (total + most - 1) / most; }

inline Simd::F load(const float* p) { return *reinterpret_cast<const FMem*>(p); }
inline void store(float* p, Simd::F v) { *reinterpret_cast<FMem*>(p) = v; }
inline void store_bits(float* p, Simd::U v) { store(p, reinterpret_cast<Simd::F>(v)); }
inline Simd::F broadcast(float v) { return v - Simd::F{}; }

inline float widen(bf16 v) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(v.bits) << 16);
}

/// How far the elements of a matrix that lie next to one another are apart: at kByTurns the numbers
/// between them are another matrix's. Vectors of these are read with the number behind the last.
enum class Spacing { kNext = 1, kByTurns = 2 };

template <Spacing spacing>
inline Simd::U widen(const bf16* p) {
  if constexpr (spacing == Spacing::kByTurns) {
    return Simd::U(*reinterpret_cast<const UMem*>(p)) << 16;
  }
  return __builtin_convertvector(*reinterpret_cast<const HMem*>(p), Simd::U) << 16;
}

// ---- Packing: bf16 -> fp32, in the order in which the register tile reads ----

/// Columns that pack_transposed_block takes: those of a vector of pairs of bf16.
template <Spacing spacing>
constexpr Index kBlockCols = kCols / static_cast<int>(spacing);

/// dst[p * dst_stride + i] = src[i * src_stride + p * spacing] for i < rows <= kWidth, p <
/// kBlockCols; lanes past `rows` get 0. Transposes pairs of bf16, then takes them apart.
template <Spacing spacing>
inline void pack_transposed_block(const bf16* src, Index src_stride, Index rows, float* dst,
                                  Index dst_stride) {
  Simd::U r[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    r[i] = i < rows ? Simd::U(*reinterpret_cast<const UMem*>(src + i * src_stride)) : Simd::U{};
  }
  Simd::transpose(r);
#pragma GCC unroll 16
  for (int p = 0; p < kWidth; ++p) {
    if constexpr (spacing == Spacing::kByTurns) {
      store_bits(dst + p * dst_stride, r[p] << 16);
    } else {
      store_bits(dst + 2 * p * dst_stride, r[p] << 16);
      store_bits(dst + (2 * p + 1) * dst_stride, r[p] & 0xffff0000u);
    }
  }
}

/// Packs any number of columns k. By turns the last are read one by one: nothing may lie
/// behind them.
template <Spacing spacing>
void pack_transposed(const bf16* src, Index src_stride, Index rows, Index k, float* dst,
                     Index dst_stride) {
  constexpr Index apart = static_cast<Index>(spacing);
  const Index last = spacing == Spacing::kByTurns ? k - 1 : k;
  Index p = 0;
  for (; p + kBlockCols<spacing> <= last; p += kBlockCols<spacing>) {
    pack_transposed_block<spacing>(src + p * apart, src_stride, rows, dst + p * dst_stride,
                                   dst_stride);
  }
  for (; p < k; ++p) {
    float column[kWidth] = {};
    for (Index i = 0; i < rows; ++i) column[i] = widen(src[i * src_stride + p * apart]);
    store(dst + p * dst_stride, load(column));
  }
}

/// dst[p * dst_stride + i] = src[p * src_stride + i * spacing] for i < count <= kWidth, p < k;
/// lanes past `count` get 0. Only the first `whole` rows are read in whole vectors.
template <Spacing spacing>
void pack_straight(const bf16* src, Index src_stride, Index count, Index k, Index whole, float* dst,
                   Index dst_stride) {
  Index p = 0;
  for (; count == kWidth && p < whole; ++p) {
    store_bits(dst + p * dst_stride, widen<spacing>(src + p * src_stride));
  }
  for (; p < k; ++p) {
    float v[kWidth] = {};
    for (Index i = 0; i < count; ++i) {
      v[i] = widen(src[p * src_stride + i * static_cast<Index>(spacing)]);
    }
    store(dst + p * dst_stride, load(v));
  }
}

/// Where the panels of a block of a lie: heights differ by at most one row, so that no panel is
/// much lower than the others.
struct PanelsOfA {
  Index rows, k, count, low, higher;  // `higher` panels of low + 1 rows, then those of `low`
  PanelsOfA(Index m, Index kc)
      : rows(m), k(kc), count(pieces(m, kRows)), low(m / count), higher(m % count) {}
  Index begin(Index panel) const { return panel * low + smaller(panel, higher); }
  Index height(Index panel) const { return panel < higher ? low + 1 : low; }
  Index offset(Index panel) const { return panel * (kRows * k + kPanelSlack); }
  Index floats() const { return offset(count); }
};

/// Panels of b are kCols wide; the last one is half as wide where that is enough.
struct PanelsOfB {
  Index cols, k, count;
  PanelsOfB(Index n, Index kc) : cols(n), k(kc), count(pieces(n, kCols)) {}
  Index begin(Index panel) const { return kCols * panel; }
  Index width(Index panel) const { return smaller(kCols, cols - begin(panel)); }
  Index vectors(Index panel) const { return pieces(width(panel), kWidth); }
  Index offset(Index panel) const { return panel * kCols * k; }
  Index floats() const { return offset(count); }
};

/// Rows of a stored matrix that are packed straight before going on to the next panel. Few, so that
/// the lines which the panels share stay in L1 although rows may lie a power of two apart; not one,
/// because neighbouring panels do.
constexpr Index kRowsAtATime = 8;

/// Element (i, p) of a panel lands at [p * height + i].
void pack_a(const PanelsOfA& panels, MatrixView a, float* dst) {
  const bool straight = a.col_stride != 1;
  const Index step = straight ? kRowsAtATime : panels.k;
  for (Index p = 0; p < panels.k; p += step) {
    const Index steps = smaller(step, panels.k - p);
    for (Index panel = 0; panel < panels.count; ++panel) {
      const Index i = panels.begin(panel), height = panels.height(panel);
      const bf16* src = a.data + i * a.row_stride + p * a.col_stride;
      float* to = dst + panels.offset(panel) + p * height;
      if (straight) {
        const bool whole_vector = i + kWidth <= panels.rows;  // may be read
        pack_straight<Spacing::kNext>(src, a.col_stride, whole_vector ? kWidth : height, steps,
                                      steps, to, height);
      } else {
        pack_transposed<Spacing::kNext>(src, a.row_stride, height, steps, to, height);
      }
    }
  }
}

/// Element (p, j) of a panel lands at [p * vectors * kWidth + j]; columns past the matrix are 0.
template <Spacing spacing>
void pack_b(const PanelsOfB& panels, MatrixView b, float* dst) {
  const bool straight = b.col_stride == static_cast<Index>(spacing);
  // By turns nothing may lie behind the last row.
  const Index whole_rows = spacing == Spacing::kByTurns ? panels.k - 1 : panels.k;
  const Index step = straight ? kRowsAtATime : panels.k;
  for (Index p = 0; p < panels.k; p += step) {
    const Index steps = smaller(step, panels.k - p);
    for (Index j = 0; j < panels.cols; j += kWidth) {
      const Index panel = j / kCols, stride = panels.vectors(panel) * kWidth;
      const Index count = smaller(kWidth, panels.cols - j);
      const bf16* src = b.data + p * b.row_stride + j * b.col_stride;
      float* to = dst + panels.offset(panel) + p * stride + j % kCols;
      if (straight) {
        const Index whole = smaller(steps, whole_rows - p);
        pack_straight<spacing>(src, b.row_stride, count, steps, whole, to, stride);
      } else {
        pack_transposed<spacing>(src, b.col_stride, count, steps, to, stride);
      }
    }
  }
}

void pack_b(const PanelsOfB& panels, MatrixView b, float* dst) {
  const bool one = b.row_stride == 1 || b.col_stride == 1;
  one ? pack_b<Spacing::kNext>(panels, b, dst) : pack_b<Spacing::kByTurns>(panels, b, dst);
}

// ---- Whether a product may be rounded apart from its sum ----

/// The exponents of the nonzero elements of a panel.
struct ExponentRange {
  int min = 255, max = 0;
};

/// Products of bf16 have 16 significant bits, so they are exact in fp32 unless they leave its
/// exponent range; then a multiplication and an addition give the bits of a fused one.
inline bool products_are_exact(ExponentRange a, ExponentRange b) {
  constexpr int kBias = 127;
  return a.min + b.min - 2 * kBias >= -135 && a.max + b.max - 2 * kBias <= 126;
}

[[maybe_unused]] ExponentRange exponents(const float* panel, Index count) {
  std::uint32_t low = ~std::uint32_t{0} >> 1, high = 0;
  for (Index i = 0; i < count; ++i) {
    const std::uint32_t magnitude = __builtin_bit_cast(std::uint32_t, panel[i]) & 0x7fffffffu;
    const std::uint32_t below = (magnitude - 1) & 0x7fffffffu;  // zeros become the largest
    low = static_cast<std::int32_t>(below) < static_cast<std::int32_t>(low) ? below : low;
    high =
        static_cast<std::int32_t>(magnitude) > static_cast<std::int32_t>(high) ? magnitude : high;
  }
  const int min = static_cast<int>(low >> 23);
  return {min == 0 ? 1 : min, static_cast<int>(high >> 23)};  // subnormals count as exponent 1
}

// ---- The register tile ----

struct FusedStep {
  static Simd::F run(Simd::F a, Simd::F b, Simd::F c) { return Simd::fma(a, b, c); }
};
struct SeparateStep {
  static Simd::F run(Simd::F a, Simd::F b, Simd::F c) { return c + a * b; }
};

/// c[height x vectors * kWidth] (+)= panel of a * panel of b.
template <class Step, int height, int vectors>
void multiply_panels(Index k, const float* a, const float* b, float* c, Index ldc, bool add) {
  Simd::F acc[height][vectors];
#pragma GCC unroll 16
  for (int i = 0; i < height; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      acc[i][v] = add ? load(c + i * ldc + v * kWidth) : Simd::F{};
    }
  }
  for (Index p = 0; p < k; ++p) {
    Simd::F bp[vectors];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) bp[v] = load(b + v * kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < height; ++i) {
      const Simd::F ai = broadcast(a[i]);
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) acc[i][v] = Step::run(ai, bp[v], acc[i][v]);
    }
    a += height;
    b += vectors * kWidth;
  }
#pragma GCC unroll 16
  for (int i = 0; i < height; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) store(c + i * ldc + v * kWidth, acc[i][v]);
  }
}

using MultiplyPanels = void (*)(Index, const float*, const float*, float*, Index, bool);

struct MultiplyTable {
  MultiplyPanels of[kRows][2];  // [height - 1][vectors - 1]
};

template <class Step, int... heights>
constexpr MultiplyTable make_table(std::integer_sequence<int, heights...>) {
  return {{{multiply_panels<Step, heights + 1, 1>, multiply_panels<Step, heights + 1, 2>}...}};
}

constexpr MultiplyTable kFused = make_table<FusedStep>(std::make_integer_sequence<int, kRows>());
constexpr MultiplyTable kSeparate =
    make_table<SeparateStep>(std::make_integer_sequence<int, kRows>());

/// multiply_panels where only `width` columns of c exist: works on a copy.
void multiply_edge(MultiplyPanels multiply, Index height, Index width, Index k, const float* a,
                   const float* b, float* c, Index ldc, bool add) {
  alignas(64) float tile[kRows * kCols];
  for (Index i = 0; add && i < height; ++i) {
    for (Index j = 0; j < width; ++j) tile[i * kCols + j] = c[i * ldc + j];
  }
  multiply(k, a, b, tile, kCols, add);
  for (Index i = 0; i < height; ++i) {
    for (Index j = 0; j < width; ++j) c[i * ldc + j] = tile[i * kCols + j];
  }
}

// ---- The product ----

/// Packed blocks, with the exponents of each panel where fma is not one instruction.
struct Packed {
  const float* data;
  ExponentRange* ranges;
};

void multiply_blocks(const PanelsOfA& pa, Packed a, const PanelsOfB& pb, Packed b, float* c,
                     Index ldc, bool add) {
  for (Index jp = 0; jp < pb.count; ++jp) {
    const float* b_panel = b.data + pb.offset(jp);
    const Index vectors = pb.vectors(jp), width = pb.width(jp);
    for (Index ip = 0; ip < pa.count; ++ip) {
      const float* a_panel = a.data + pa.offset(ip);
      const Index height = pa.height(ip);
      const bool fused = Simd::kNativeFma || !products_are_exact(a.ranges[ip], b.ranges[jp]);
      const MultiplyTable& table = fused ? kFused : kSeparate;
      const MultiplyPanels multiply = table.of[height - 1][vectors - 1];
      float* tile = c + pa.begin(ip) * ldc + pb.begin(jp);
      if (width == vectors * kWidth) {
        multiply(pa.k, a_panel, b_panel, tile, ldc, add);
      } else {
        multiply_edge(multiply, height, width, pa.k, a_panel, b_panel, tile, ldc, add);
      }
    }
  }
}

inline MatrixView offset_view(MatrixView v, Index i, Index j) {
  return {v.data + i * v.row_stride + j * v.col_stride, v.row_stride, v.col_stride};
}

/// The start of piece `i` when `total` is cut into pieces of at most `most`, nearly equal and, but
/// for the last, multiples of `unit`.
inline Index cut(Index total, Index most, Index unit, Index i) {
  const Index size = pieces(pieces(total, pieces(total, most)), unit) * unit;
  return smaller(total, i * size);
}

void gemm(Index m, Index n, Index k, MatrixView a, MatrixView b, float* c, Index ldc,
          GemmScratch& scratch, bool add) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (add) return;
    for (Index i = 0; i < m; ++i) {
      for (Index j = 0; j < n; ++j) c[i * ldc + j] = 0.0f;
    }
    return;
  }
  const PanelsOfB largest_b(smaller(n, kBlockN), smaller(k, kBlockK));
  const PanelsOfA largest_a(smaller(m, kBlockM), smaller(k, kBlockK));
  float* const b_data = scratch.reserve(
      static_cast<std::size_t>(largest_b.floats() + largest_a.floats() + kPanelSlack));
  float* const a_data = b_data + largest_b.floats();
  ExponentRange a_ranges[Simd::kNativeFma ? 1 : pieces(kBlockM, kRows)];
  ExponentRange b_ranges[Simd::kNativeFma ? 1 : pieces(kBlockN, kCols)];

  for (Index j0 = 0; j0 < n; j0 += kBlockN) {
    for (Index p0 = 0, ip = 0; p0 < k; ++ip) {
      const Index p1 = cut(k, kBlockK, kCols, ip + 1);
      const PanelsOfB pb(smaller(kBlockN, n - j0), p1 - p0);
      pack_b(pb, offset_view(b, p0, j0), b_data);
      if constexpr (!Simd::kNativeFma) {
        for (Index i = 0; i < pb.count; ++i) {
          b_ranges[i] = exponents(b_data + pb.offset(i), pb.vectors(i) * kWidth * pb.k);
        }
      }
      for (Index i0 = 0; i0 < m; i0 += kBlockM) {
        const PanelsOfA pa(smaller(kBlockM, m - i0), p1 - p0);
        pack_a(pa, offset_view(a, i0, p0), a_data);
        if constexpr (!Simd::kNativeFma) {
          for (Index i = 0; i < pa.count; ++i) {
            a_ranges[i] = exponents(a_data + pa.offset(i), pa.height(i) * pa.k);
          }
        }
        multiply_blocks(pa, {a_data, a_ranges}, pb, {b_data, b_ranges}, c + i0 * ldc + j0, ldc,
                        add || p0 > 0);
      }
      p0 = p1;
    }
  }
}

}  // namespace
}  // namespace uniep::cpu
