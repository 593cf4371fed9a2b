// gemm_tile() on one thread, per instruction set and layout, beside OpenBLAS sgemm of the same
// size. gemm_tile reads bf16 and packs it; sgemm reads fp32. Ends with a table of ratios of the
// best repetitions, which the neighbours on a shared machine disturb least.
//
//   OPENBLAS_CORETYPE=SkylakeX uniep_gemm_bench --benchmark_repetitions=5
//   --benchmark_enable_random_interleaving=true
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"
#ifdef UNIEP_OPENBLAS
#include <cblas.h>
#endif

namespace {

using uniep::bf16;
using uniep::cpu::Isa;
using uniep::cpu::Kernels;
using uniep::cpu::MatrixView;
using Index = std::int64_t;

struct Layout {
  const char* name;  // what of a and b is stored transposed, as BLAS counts it: a is [m, k] in "N"
  const char* stages;
  bool a_transposed, b_transposed;
};
constexpr Layout kLayouts[] = {
    {"NT", "fc1, fc2", false, true}, {"NN", "dgrad", false, false}, {"TN", "wgrad", true, false}};

struct Shape {
  Index m, n, k;
};
constexpr Shape kShapes[] = {{128, 256, 1024}, {128, 256, 2048}, {128, 256, 4096},
                             {128, 128, 1024}, {64, 256, 1024},  {64, 128, 1024},
                             {64, 64, 1024},   {128, 128, 256},  {64, 64, 128}};

constexpr const char* kBlas = "openblas";

std::string key(const char* who, const Layout& layout, const Shape& s) {
  return std::string(who) + "/" + layout.name + "/" + std::to_string(s.m) + "x" +
         std::to_string(s.n) + "x" + std::to_string(s.k);
}

std::vector<bf16> random_matrix(Index count, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<bf16> v(static_cast<std::size_t>(count));
  for (bf16& e : v) e = uniep::to_bf16(normal(rng));
  return v;
}

void report_flops(benchmark::State& state, const Shape& s) {
  state.counters["GFLOP/s"] = benchmark::Counter(2e-9 * static_cast<double>(s.m * s.n * s.k),
                                                 benchmark::Counter::kIsIterationInvariantRate);
}

void time_gemm_tile(benchmark::State& state, const Kernels* kernels, Layout layout, Shape s) {
  const std::vector<bf16> a = random_matrix(s.m * s.k, 1), b = random_matrix(s.k * s.n, 2);
  std::vector<float> c(static_cast<std::size_t>(s.m * s.n));
  const MatrixView va =
      layout.a_transposed ? MatrixView{a.data(), 1, s.m} : MatrixView{a.data(), s.k, 1};
  const MatrixView vb =
      layout.b_transposed ? MatrixView{b.data(), 1, s.k} : MatrixView{b.data(), s.n, 1};
  uniep::cpu::GemmScratch scratch;
  for (auto _ : state) {
    gemm_tile(*kernels, s.m, s.n, s.k, va, vb, c.data(), s.n, scratch);
    benchmark::ClobberMemory();
  }
  report_flops(state, s);
}

#ifdef UNIEP_OPENBLAS
void time_openblas(benchmark::State& state, Layout layout, Shape s) {
  const std::vector<bf16> a16 = random_matrix(s.m * s.k, 1), b16 = random_matrix(s.k * s.n, 2);
  std::vector<float> a, b, c(static_cast<std::size_t>(s.m * s.n));
  for (const bf16 v : a16) a.push_back(to_float(v));
  for (const bf16 v : b16) b.push_back(to_float(v));
  const auto op = [](bool transposed) { return transposed ? CblasTrans : CblasNoTrans; };
  const int m = static_cast<int>(s.m), n = static_cast<int>(s.n), k = static_cast<int>(s.k);
  for (auto _ : state) {
    cblas_sgemm(CblasRowMajor, op(layout.a_transposed), op(layout.b_transposed), m, n, k, 1.0f,
                a.data(), layout.a_transposed ? m : k, b.data(), layout.b_transposed ? k : n, 0.0f,
                c.data(), n);
    benchmark::ClobberMemory();
  }
  report_flops(state, s);
}
#endif

/// Prints as usual, and keeps the best rate of each benchmark.
class BestReporter : public benchmark::ConsoleReporter {
 public:
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration) continue;
      double& best = best_[run.run_name.function_name];
      best = std::max<double>(best, run.counters.at("GFLOP/s"));
    }
    ConsoleReporter::ReportRuns(runs);
  }
  /// 0 where it did not run.
  double best(const std::string& name) const {
    const auto found = best_.find(name);
    return found == best_.end() ? 0 : found->second;
  }

 private:
  std::map<std::string, double> best_;
};

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found;
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (const Kernels* k = uniep::cpu::kernels_for(isa)) found.push_back(k);
  }
  return found;
}

void print_table(const BestReporter& results) {
  const std::vector<const Kernels*> all = available_kernels();
  std::printf("\n# best GFLOP/s of each, and its ratio to OpenBLAS sgemm on one thread\n");
#ifdef UNIEP_OPENBLAS
  std::printf("# OpenBLAS kernels: %s\n", openblas_get_corename());
#endif
  std::printf("# %-3s %-9s %5s %5s %5s %10s", "", "stages", "m", "n", "k", kBlas);
  for (const Kernels* k : all) std::printf("  %9s ratio", k->name);
  std::printf("\n");
  for (const Layout& layout : kLayouts) {
    for (const Shape& s : kShapes) {
      const double blas = results.best(key(kBlas, layout, s));
      std::printf("  %-3s %-9s %5ld %5ld %5ld %10.1f", layout.name, layout.stages,
                  static_cast<long>(s.m), static_cast<long>(s.n), static_cast<long>(s.k), blas);
      for (const Kernels* k : all) {
        const double rate = results.best(key(k->name, layout, s));
        std::printf("  %9.1f  %4.2f", rate, blas > 0 ? rate / blas : 0.0);
      }
      std::printf("\n");
    }
  }
}

#ifdef UNIEP_OPENBLAS
/// OpenBLAS falls back to its oldest kernels on a CPU that it does not know, and reads the variable
/// before main() runs.
void warn_of_slow_openblas() {
  if (std::getenv("OPENBLAS_CORETYPE") != nullptr || kernels_for(Isa::kAvx2) == nullptr) return;
  std::fprintf(
      stderr,
      "# OpenBLAS chose its kernels for '%s'. If this CPU is newer than that, compare with "
      "OPENBLAS_CORETYPE=%s instead.\n",
      openblas_get_corename(), kernels_for(Isa::kAvx512) != nullptr ? "SkylakeX" : "Haswell");
}
#endif

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
#ifdef UNIEP_OPENBLAS
  openblas_set_num_threads(1);
  benchmark::AddCustomContext("openblas", openblas_get_corename());
  warn_of_slow_openblas();
#endif
  for (const Layout& layout : kLayouts) {
    for (const Shape& s : kShapes) {
#ifdef UNIEP_OPENBLAS
      benchmark::RegisterBenchmark(key(kBlas, layout, s).c_str(), time_openblas, layout, s)
          ->MinTime(0.05);
#endif
      for (const Kernels* k : available_kernels()) {
        benchmark::RegisterBenchmark(key(k->name, layout, s).c_str(), time_gemm_tile, k, layout, s)
            ->MinTime(0.05);
      }
    }
  }
  BestReporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  print_table(reporter);
  return 0;
}
