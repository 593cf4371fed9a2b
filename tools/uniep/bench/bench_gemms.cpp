#include "bench/bench_gemms.h"

#include <algorithm>

#include "base/math.h"
#include "base/quantile.h"
#include "bench/bench_kernels.h"
#include "bench/cublas_library.h"
#include "cuda/device_array.h"
#include "graph/layer_graph.h"

namespace uniep::tool {
namespace {

using cuda::check_cuda;
using cuda::DeviceArray;

class Handle {
 public:
  Handle() {
    const CublasLibrary& cublas = CublasLibrary::get();
    cublas.check(cublas.create(&handle_), "start cuBLAS");
  }
  ~Handle() { CublasLibrary::get().destroy(handle_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  cublasHandle_t get() const { return handle_; }

 private:
  cublasHandle_t handle_ = nullptr;
};

class Event {
 public:
  Event() { check_cuda(cudaEventCreate(&event_), "create an event"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record() { check_cuda(cudaEventRecord(event_, nullptr), "record an event"); }
  double seconds_since(const Event& start) const {
    float ms = 0;
    check_cuda(cudaEventSynchronize(event_), "wait for a GEMM");
    check_cuda(cudaEventElapsedTime(&ms, start.event_, event_), "read the time of a GEMM");
    return ms * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// A product's operands and result on the device: a batch of experts, one behind the other.
struct Operands {
  const bf16* a;
  const bf16* b;
  bf16* c;
};

void run(const Handle& handle, const Product& p, const Operands& o, int experts) {
  const auto m = static_cast<int>(p.m), n = static_cast<int>(p.n), k = static_cast<int>(p.k);
  const bool a_transposed = p.layout == ProductLayout::kTN;
  const bool b_transposed = p.layout == ProductLayout::kNT;
  const float one = 1;
  const float zero = 0;
  const auto op = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  // cuBLAS counts columns first: what is row-major is transposed to it, so it is asked for
  // c^T = b^T a^T, with the operands as they lie.
  const CublasLibrary& cublas = CublasLibrary::get();
  cublas.check(cublas.gemm_strided_batched(handle.get(), op(b_transposed), op(a_transposed), n, m,
                                           k, &one, o.b, CUDA_R_16BF, b_transposed ? k : n,
                                           p.n * p.k, o.a, CUDA_R_16BF, a_transposed ? m : k,
                                           p.m * p.k, &zero, o.c, CUDA_R_16BF, n, p.m * p.n,
                                           experts, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
               "run a GEMM");
}

double median_seconds(const Handle& handle, const Product& p, const Operands& o, int experts,
                      const BenchOptions& options) {
  const auto calls = static_cast<std::size_t>(options.iterations);
  for (int i = 0; i < options.warmup; ++i) run(handle, p, o, experts);
  // Back to back, as a pass runs them.
  std::vector<Event> marks(calls + 1);
  marks[0].record();
  for (std::size_t i = 1; i <= calls; ++i) {
    run(handle, p, o, experts);
    marks[i].record();
  }
  std::vector<double> seconds;
  for (std::size_t i = 1; i <= calls; ++i) seconds.push_back(marks[i].seconds_since(marks[i - 1]));
  return median(seconds);
}

/// Random numbers: a GPU multiplies zeros faster, for they take less power.
DeviceArray<bf16> random_rows(std::int64_t count, std::uint64_t stream) {
  DeviceArray<bf16> rows(count);
  const workload::NormalStream numbers(stream, 0);
  check_cuda(launch_fill_normal(rows.data(), count, numbers.key(), 0, 1), "fill rows");
  return rows;
}

}  // namespace

GemmSeconds time_gemms(const BenchCase& bench, int rank, const BenchOptions& options,
                       std::span<const bf16> w1, std::span<const bf16> w2) {
  const workload::ShapeSpec& s = bench.spec;
  const std::int64_t experts = bench.local_experts();
  const std::int64_t rows = ceil_div(bench.rows(rank), experts);
  GemmSeconds seconds{};
  if (rows == 0) return seconds;

  const std::int64_t widest = std::max(s.hidden, 2 * s.intermediate);
  const DeviceArray<bf16> left = random_rows(experts * rows * widest, 1);
  const DeviceArray<bf16> right = random_rows(experts * rows * widest, 2);
  const DeviceArray<bf16> result(experts * std::max(rows * widest, 2 * s.intermediate * s.hidden));
  const Handle handle;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    if (pass == Pass::kBackward && options.passes == PassChoice::kForward) continue;
    for (const Product& p : products(s, pass, rows, choice_of(bench.problem))) {
      const bool of_w1 = row_of(p.stage).reads[1] == Tensor::kW1;
      const bf16* weights = of_w1 ? w1.data() : w2.data();
      const bf16* b = p.layout == ProductLayout::kTN ? right.data() : weights;
      seconds[static_cast<std::size_t>(p.stage)] = median_seconds(
          handle, p, {left.data(), b, result.data()}, static_cast<int>(experts), options);
    }
  }
  return seconds;
}

}  // namespace uniep::tool
