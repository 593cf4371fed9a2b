// Does communication hide under computation? Chooses an emulated link so slow that the wire takes as
// long as the arithmetic, then times schedules side by side in one run.
//
//   uniep_overlap_bench [shape] [ranks] [repeats]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "uniep/uniep.h"
#include "workload/split.h"
#include "workload/synthetic.h"

namespace uniep {
namespace {

struct Times {
  double forward_s = 0;
  double backward_s = 0;
  double total() const { return forward_s + backward_s; }
};

struct Case {
  std::string name;
  Schedule schedule;
  std::vector<Times> samples;
};

struct Step {
  Times times;                     // of the slowest rank
  std::int64_t wire_bytes = 0;     // through the busiest port, both passes
};

/// One step on a new group, so that the link's environment variables count; the second of two, the
/// first being a warm-up.
Step run_step(const LayerData& data, int ranks, const Schedule& schedule) {
  const workload::Split split(data, ranks);
  LayerResult result = workload::make_result(data, {});
  std::vector<Step> steps(static_cast<std::size_t>(ranks));
  run_ranks(Communicator::cpu_group(ranks), [&](Communicator& communicator) {
    const int rank = communicator.rank();
    Layer layer(split.problem(), communicator);
    Step& step = steps[static_cast<std::size_t>(rank)];
    for (int i = 0; i < 2; ++i) {
      step = {};
      const RoutingPlan plan = layer.plan(split.topk_ids(rank));
      const Saved saved = layer.forward(plan, split.forward_args(rank, result), schedule);
      step.times.forward_s = layer.last_pass().elapsed_s;
      step.wire_bytes = layer.last_pass().pulled_bytes + layer.last_pass().pushed_bytes;
      layer.backward(saved, split.backward_args(rank, result), schedule);
      step.times.backward_s = layer.last_pass().elapsed_s;
      step.wire_bytes += layer.last_pass().pulled_bytes + layer.last_pass().pushed_bytes;
    }
  });
  Step worst;
  for (const Step& s : steps) {
    worst.times.forward_s = std::max(worst.times.forward_s, s.times.forward_s);
    worst.times.backward_s = std::max(worst.times.backward_s, s.times.backward_s);
    worst.wire_bytes = std::max(worst.wire_bytes, s.wire_bytes);
  }
  return worst;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

template <class F>
double median_of(const Case& c, F&& value) {
  std::vector<double> v;
  for (const Times& t : c.samples) v.push_back(value(t));
  return median(v);
}

int run(const std::string& shape, int ranks, int repeats) {
  const workload::ShapeSpec spec = workload::parse_shape(shape);
  const LayerData data = workload::make_layer(spec, ranks, 1, 0);

  unsetenv("UNIEP_CPU_LINK_GBPS");
  const Schedule plain = parse_schedule("single");
  std::vector<double> compute;
  std::int64_t wire_bytes = 0;
  for (int i = 0; i < repeats; ++i) {
    const Step step = run_step(data, ranks, plain);
    compute.push_back(step.times.total());
    wire_bytes = step.wire_bytes;
  }
  const double compute_s = median(compute);
  const double gbps = static_cast<double>(wire_bytes) / compute_s * 1e-9;
  setenv("UNIEP_CPU_LINK_GBPS", std::to_string(gbps).c_str(), 1);
  std::printf("# shape %s, %d ranks; without a link %.2f ms; %.2f MB over a rank's port\n",
              workload::to_string(spec).c_str(), ranks, compute_s * 1e3,
              static_cast<double>(wire_bytes) * 1e-6);
  std::printf("# link %.4f GB/s per direction: as long on the wire as in arithmetic\n", gbps);

  std::vector<Case> cases;
  for (const char* name : {"sequential", "pipelined:2", "pipelined:4", "two-kernel", "single"}) {
    cases.push_back({name, parse_schedule(name), {}});
  }
  for (int i = 0; i < repeats; ++i) {
    for (Case& c : cases) c.samples.push_back(run_step(data, ranks, c.schedule).times);
  }

  const double sequential = median_of(cases[0], [](const Times& t) { return t.total(); });
  std::printf("%-12s %12s %12s %12s %12s\n", "schedule", "forward_ms", "backward_ms", "step_ms",
              "speedup");
  for (const Case& c : cases) {
    const double total = median_of(c, [](const Times& t) { return t.total(); });
    std::printf("%-12s %12.2f %12.2f %12.2f %12.2f\n", c.name.c_str(),
                1e3 * median_of(c, [](const Times& t) { return t.forward_s; }),
                1e3 * median_of(c, [](const Times& t) { return t.backward_s; }), 1e3 * total,
                sequential / total);
  }
  return 0;
}

}  // namespace
}  // namespace uniep

int main(int argc, char** argv) {
  try {
    return uniep::run(argc > 1 ? argv[1] : "small,tokens=2048,hidden=512,intermediate=256",
                      argc > 2 ? std::atoi(argv[2]) : 2, argc > 3 ? std::atoi(argv[3]) : 5);
  } catch (const uniep::Error& e) {
    std::fprintf(stderr, "uniep_overlap_bench: %s\n", e.what());
    return 2;
  }
}
