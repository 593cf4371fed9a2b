// Times the plan kernel and the order kernel on GPUs, without a host between launches: graphs of
// many, of which one's share is reported.
//
//   uniep_plan_bench [TOKENS [TOPK [EXPERTS [RANKS [CTAS]]]]]
//
// With as many GPUs as ranks, every rank runs on its own and the exchange of the routing is real.
// With fewer, rank 0 runs alone: it pushes to its own GPU, and what peers would have sent lies
// there before the clock starts.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "base/cuda/check_cuda.h"
#include "cuda/plan_kernels.h"

namespace uniep {
namespace {

using cuda::check_cuda;

constexpr int kLaunches = 20;  // in a graph
constexpr int kRepeats = 25;

std::byte* allocate(std::int64_t bytes) {
  void* p = nullptr;
  check_cuda(cudaMalloc(&p, static_cast<std::size_t>(bytes)), "allocate");
  check_cuda(cudaMemset(p, 0, static_cast<std::size_t>(bytes)), "clear");
  return static_cast<std::byte*>(p);
}

/// K different experts for every token, as a router picks them.
std::vector<std::int32_t> random_ids(const Problem& p, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<std::int32_t> experts(static_cast<std::size_t>(p.num_experts));
  for (std::size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<std::int32_t>(e);
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < p.max_tokens; ++t) {
    for (int k = 0; k < p.topk; ++k) {
      const auto i = static_cast<std::size_t>(k);
      std::swap(experts[i], experts[i + rng() % (experts.size() - i)]);
      ids.push_back(experts[i]);
    }
  }
  return ids;
}

struct Rank {
  Rank(const Problem& p, int rank, int num_ranks, int on_device) : device(on_device) {
    check_cuda(cudaSetDevice(device), "choose device");
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "make a stream");
    check_cuda(cudaEventCreate(&begin), "make an event");
    check_cuda(cudaEventCreate(&end), "make an event");
    exchange = allocate(PlanExchangeLayout(p, num_ranks).bytes);
    scratch = cuda::plan_scratch(allocate(cuda::PlanScratchLayout(p, num_ranks).bytes),
                                 cuda::PlanScratchLayout(p, num_ranks));
    plan = cuda::device_plan(allocate(cuda::DevicePlanLayout(p, num_ranks).bytes),
                             cuda::DevicePlanLayout(p, num_ranks));
    const auto host = random_ids(p, static_cast<unsigned>(rank) + 1);
    ids = reinterpret_cast<std::int32_t*>(allocate(static_cast<std::int64_t>(host.size()) * 4));
    check_cuda(cudaMemcpy(ids, host.data(), host.size() * 4, cudaMemcpyDefault), "copy ids");
    check_cuda(cudaMallocHost(reinterpret_cast<void**>(&report), sizeof(*report)), "allocate");
    *report = {};
  }

  int device;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  std::byte* exchange = nullptr;
  cuda::PlanScratch scratch;
  cuda::DevicePlan plan;
  std::int32_t* ids = nullptr;
  cuda::PlanReport* report = nullptr;
};

struct Bench {
  Problem problem;
  int num_ranks;
  int ctas;
  bool real;  // a GPU a rank
  std::vector<std::unique_ptr<Rank>> ranks;

  cuda::PlanArgs args(int r) const {
    cuda::PlanExchange exchange{PlanExchangeLayout(problem, num_ranks)};
    for (int i = 0; i < num_ranks; ++i) exchange.parts[i] = ranks[i]->exchange;
    return cuda::plan_args(problem, r, num_ranks, problem.max_tokens, ranks[r]->ids, exchange,
                           ranks[r]->scratch, ranks[r]->plan, ranks[r]->report, 2000);
  }
  int active() const { return real ? num_ranks : 1; }
};

void connect(int count) {
  for (int d = 0; d < count; ++d) {
    check_cuda(cudaSetDevice(d), "choose device");
    for (int peer = 0; peer < count; ++peer) {
      if (peer != d) check_cuda(cudaDeviceEnablePeerAccess(peer, 0), "reach a peer");
    }
  }
}

/// Both halves of rank 0's buffers hold what all ranks send, and its flags are far ahead.
void deliver(const Bench& b) {
  const PlanExchangeLayout l(b.problem, b.num_ranks);
  const std::size_t slots = static_cast<std::size_t>(b.problem.max_tokens * b.problem.topk);
  std::byte* base = b.ranks[0]->exchange;
  const std::uint32_t far = 1u << 30;
  for (int i = 0; i < 2 * b.num_ranks; ++i) {
    const int source = i % b.num_ranks;
    check_cuda(cudaMemcpy(base + l.ids + i * l.slots_per_rank * 4, b.ranks[source]->ids, slots * 4,
                          cudaMemcpyDefault),
               "deliver");
    check_cuda(cudaMemcpy(base + l.tokens + i * 8, &b.problem.max_tokens, 8, cudaMemcpyDefault),
               "deliver");
    if (source != 0) {
      check_cuda(cudaMemcpy(base + l.flags + source * 4, &far, 4, cudaMemcpyDefault), "deliver");
    }
  }
}

/// Median microseconds per launch; `launch(r)` enqueues one on rank r's stream.
double median_us(const Bench& b, const std::function<cudaError_t(int)>& launch) {
  std::vector<cudaGraphExec_t> graphs;
  for (int r = 0; r < b.active(); ++r) {
    check_cuda(cudaSetDevice(b.ranks[r]->device), "choose device");
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check_cuda(cudaStreamBeginCapture(b.ranks[r]->stream, cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < kLaunches; ++i) check_cuda(launch(r), "launch");
    check_cuda(cudaStreamEndCapture(b.ranks[r]->stream, &graph), "capture");
    check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    graphs.push_back(exec);
  }
  std::vector<double> times;
  for (int i = -3; i < kRepeats; ++i) {
    for (int r = 0; r < b.active(); ++r) {
      const Rank& rank = *b.ranks[r];
      check_cuda(cudaSetDevice(rank.device), "choose device");
      check_cuda(cudaEventRecord(rank.begin, rank.stream), "record");
      check_cuda(cudaGraphLaunch(graphs[r], rank.stream), "replay");
      check_cuda(cudaEventRecord(rank.end, rank.stream), "record");
    }
    for (int r = 0; r < b.active(); ++r) {
      check_cuda(cudaStreamSynchronize(b.ranks[r]->stream), "run");
    }
    // The last rank to start waits for nobody's launch but its own.
    const Rank& last = *b.ranks[b.active() - 1];
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, last.begin, last.end), "time");
    if (i >= 0) times.push_back(ms * 1000 / kLaunches);
  }
  for (const auto g : graphs) cudaGraphExecDestroy(g);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void bench_order(const Bench& b, Pass pass, const char* text) {
  const Schedule schedule = parse_schedule(text, default_schedule(Backend::kCuda));
  std::vector<cuda::OrderArgs> args;
  for (int r = 0; r < b.active(); ++r) {
    check_cuda(cudaSetDevice(b.ranks[r]->device), "choose device");
    const cuda::DeviceOrderLayout layout(b.problem, b.num_ranks, pass, schedule);
    const auto order = cuda::device_order(allocate(layout.bytes), layout);
    const Rank& rank = *b.ranks[r];
    args.push_back({cuda::make_pass_view(b.problem, r, b.num_ranks, b.problem.max_tokens, rank.plan,
                                         order, pass, schedule),
                    rank.plan, order, rank.scratch});
  }
  const double us =
      median_us(b, [&](int r) { return cuda::launch_order(args[r], b.ctas, b.ranks[r]->stream); });
  std::printf("%10.1f us  order, %s, %s (%s)\n", us, name(pass), text, to_string(schedule).c_str());
}

int run(int argc, char** argv) {
  const auto number = [&](int i, int otherwise) {
    return i < argc ? std::atoi(argv[i]) : otherwise;
  };
  Problem p{.hidden = 7168, .intermediate = 2048};
  p.max_tokens = number(1, 8192);
  p.topk = number(2, 8);
  p.num_experts = number(3, 256);
  const int num_ranks = number(4, 4);
  int devices = 0;
  check_cuda(cudaGetDeviceCount(&devices), "count devices");
  Bench b{p, num_ranks, number(5, 0), devices >= num_ranks, {}};
  if (b.real) connect(num_ranks);
  for (int r = 0; r < num_ranks; ++r) {
    b.ranks.push_back(std::make_unique<Rank>(p, r, num_ranks, b.real ? r : 0));
  }
  if (!b.real) deliver(b);
  std::printf("# T=%d K=%d E=%d ranks=%d ctas=%d, %s\n", static_cast<int>(p.max_tokens), p.topk,
              p.num_experts, num_ranks, b.ctas,
              b.real ? "a GPU a rank, exchange included" : "rank 0 alone, ids gathered before");
  const double us =
      median_us(b, [&](int r) { return cuda::launch_plan(b.args(r), b.ctas, b.ranks[r]->stream); });
  std::printf("%10.1f us  plan\n", us);
  for (int r = 0; r < b.active(); ++r) throw_if_any(*b.ranks[r]->report, p, r, num_ranks, 2000);
  bench_order(b, Pass::kForward, "sequential");
  bench_order(b, Pass::kForward, "single");
  bench_order(b, Pass::kBackward, "single");
  bench_order(b, Pass::kBackward, "pipelined:4,tile_m=128,dispatch_wire=rows");
  return 0;
}

}  // namespace
}  // namespace uniep

int main(int argc, char** argv) {
  try {
    return uniep::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
