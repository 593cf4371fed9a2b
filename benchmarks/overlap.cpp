// Does communication hide under computation? Chooses an emulated link, or a network between hosts,
// so slow that the wire takes as long as the arithmetic, then times schedules side by side in one
// run.
//
//   uniep_overlap_bench [shape] [ranks[/hosts[/groups]]] [repeats] [schedule ...]
//
// With hosts ranks are on so many of them, and only what crosses between these takes time; with
// combine groups, as many as hosts or more, sums come back instead of rows. Speedups are relative
// to the first schedule (default: sequential).
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/check.h"
#include "plan/host_routes.h"
#include "uniep/uniep.h"
#include "workload/split.h"
#include "workload/synthetic.h"

namespace uniep {
namespace {

struct Group {
  int ranks = 2;
  int hosts = 1;
  int combine_groups = 1;
};

struct Sample {
  double seconds = 0;           // of the slowest rank
  std::int64_t wire_bytes = 0;  // through the busiest rank's port, per direction
};

void include(Sample& worst, const PassStats& stats) {
  worst.seconds = std::max(worst.seconds, stats.elapsed_s);
  worst.wire_bytes = std::max(worst.wire_bytes, stats.pulled_bytes + stats.pushed_bytes);
}

/// What crosses between hosts in a pass, per direction and rank.
std::int64_t network_bytes(const LayerData& data, const Group& group) {
  std::vector<std::int64_t> tokens;
  const workload::Split split(data, group.ranks);
  for (int rank = 0; rank < group.ranks; ++rank) tokens.push_back(split.tokens(rank).size());
  const HostTraffic traffic =
      host_traffic(split.problem(), {tokens, data.topk_ids, group.hosts},
                   {group.hosts, group.ranks / group.hosts}, HostWire::kRelayed);
  const std::int64_t row = data.hidden * static_cast<std::int64_t>(sizeof(bf16));
  const std::int64_t sum = partial_bytes(split.problem());
  return ((traffic.tokens.network + traffic.rows.network) * row + traffic.partials.network * sum) /
         group.ranks;
}

/// One pass of the second step on a new group: the link's speed is read when a group is made, and
/// the first step is a warm-up.
Sample run_pass(const LayerData& data, const Group& group, Pass pass, const Schedule& schedule) {
  const workload::Split split(data, group.ranks);
  LayerResult result = workload::make_result(data, {});
  Sample worst;
  std::mutex mutex;
  run_ranks(Communicator::cpu_group(group.ranks, group.hosts), [&](Communicator& communicator) {
    const int rank = communicator.rank();
    Layer layer(split.problem(), communicator);
    const RoutingPlan plan = layer.plan(split.topk_ids(rank));
    for (int step = 0; step < 2; ++step) {
      const Saved saved = layer.forward(plan, split.forward_args(rank, result), schedule);
      if (pass == Pass::kBackward) {
        layer.backward(saved, split.backward_args(rank, result), schedule);
      }
    }
    const std::scoped_lock lock(mutex);
    include(worst, layer.last_pass());
  });
  return worst;
}

double median_seconds(std::vector<Sample> samples) {
  std::sort(samples.begin(), samples.end(),
            [](const Sample& a, const Sample& b) { return a.seconds < b.seconds; });
  return samples[samples.size() / 2].seconds;
}

struct Case {
  std::string name;
  Schedule schedule;
  std::vector<Sample> samples;
};

/// Times all schedules of one pass, turn by turn, over a link that takes as long as the arithmetic.
void compare(const LayerData& data, const Group& group, Pass pass,
             const std::vector<std::string>& schedules, int repeats) {
  const char* const speed = group.hosts > 1 ? "UNIEP_CPU_NETWORK_GBPS" : "UNIEP_CPU_LINK_GBPS";
  unsetenv(speed);
  std::vector<Sample> plain;
  for (int i = 0; i < repeats; ++i) {
    plain.push_back(run_pass(data, group, pass, parse_schedule("single")));
  }
  const double compute_s = median_seconds(plain);
  const auto bytes =
      static_cast<double>(group.hosts > 1 ? network_bytes(data, group) : plain[0].wire_bytes);
  const double gbps = bytes / compute_s * 1e-9;
  setenv(speed, std::to_string(gbps).c_str(), 1);
  std::printf(
      "# %s without a link %.2f ms; %.2f MB per direction and rank at %.4f GB/s take as long\n",
      name(pass), compute_s * 1e3, bytes * 1e-6, gbps);

  std::vector<Case> cases;
  for (const std::string& name : schedules) cases.push_back({name, parse_schedule(name), {}});
  for (int i = 0; i < repeats; ++i) {
    for (Case& c : cases) c.samples.push_back(run_pass(data, group, pass, c.schedule));
  }
  const double first = median_seconds(cases[0].samples);
  for (const Case& c : cases) {
    const double seconds = median_seconds(c.samples);
    std::printf("%-9s %10.2f %10.2f %10.2f  %s\n", name(pass), seconds * 1e3, first / seconds,
                seconds / compute_s, c.name.c_str());
  }
}

constexpr const char* kUsage =
    "usage: uniep_overlap_bench [shape] [ranks[/hosts[/groups]]] [repeats] [schedule ...]\n";

int number(const char* what, std::string_view text, int most) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, value);
  require(parsed.ec == std::errc{} && parsed.ptr == end && value >= 1 && value <= most,
          ErrorCode::kInvalidArgument, what, " is '", text, "'; an integer from 1 to ", most,
          " is accepted");
  return value;
}

/// The command line.
struct Arguments {
  std::string shape = "small,tokens=2048,hidden=512,intermediate=256,topk=2";
  Group group;
  int repeats = 9;
  std::vector<std::string> schedules{"sequential", "pipelined:2", "pipelined:4", "two-kernel",
                                     "single"};
};

/// "4", "4/2" or "4/2/2".
Group parse_group(std::string_view text) {
  Group group;
  int* const fields[] = {&group.ranks, &group.hosts, &group.combine_groups};
  const char* const names[] = {"ranks", "hosts", "groups"};
  for (int i = 0;; ++i) {
    require(i < 3, ErrorCode::kInvalidArgument, "ranks are followed by '", text,
            "'; hosts and groups are accepted");
    const std::size_t slash = text.find('/');
    *fields[i] = number(names[i], text.substr(0, slash), i == 2 ? 4096 : 64);
    if (slash == text.npos) break;
    text.remove_prefix(slash + 1);
  }
  layout_of_hosts(group.ranks, group.hosts);
  return group;
}

/// Everything is read before anything is timed.
Arguments parse(const std::vector<std::string>& words) {
  Arguments a;
  if (!words.empty()) a.shape = words[0];
  if (words.size() > 1) a.group = parse_group(words[1]);
  if (words.size() > 2) a.repeats = number("repeats", words[2], 10000);
  if (words.size() > 3) a.schedules.assign(words.begin() + 3, words.end());
  const workload::ShapeSpec spec = workload::parse_shape(a.shape);
  require(spec.num_experts % a.group.ranks == 0, ErrorCode::kInvalidArgument, "ranks is ",
          a.group.ranks, "; a number that divides the ", spec.num_experts, " experts is accepted");
  for (const std::string& schedule : a.schedules) parse_schedule(schedule);
  return a;
}

int run(const Arguments& a) {
  workload::ShapeSpec spec = workload::parse_shape(a.shape);
  spec.combine_groups = a.group.combine_groups;
  const LayerData data = workload::make_layer(spec, a.group.ranks, 1, 0);

  std::printf("# %s, %d ranks on %d hosts, %d combine groups, %u cores, median of %d\n",
              workload::to_string(spec).c_str(), a.group.ranks, a.group.hosts,
              a.group.combine_groups, std::thread::hardware_concurrency(), a.repeats);
  std::printf("%-9s %10s %10s %10s  %s\n", "# pass", "ms", "speedup", "/compute", "schedule");
  compare(data, a.group, Pass::kForward, a.schedules, a.repeats);
  compare(data, a.group, Pass::kBackward, a.schedules, a.repeats);
  return 0;
}

}  // namespace
}  // namespace uniep

int main(int argc, char** argv) {
  try {
    return uniep::run(uniep::parse({argv + std::min(argc, 1), argv + argc}));
  } catch (const uniep::Error& e) {
    const bool usage = e.code() == uniep::ErrorCode::kInvalidArgument;
    std::fprintf(stderr, "uniep_overlap_bench: %s\n%s", e.what(), usage ? uniep::kUsage : "");
    return 2;
  }
}
