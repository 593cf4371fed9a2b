#include "profile/measure_profile.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "base/cpu_info.h"
#include "base/env.h"
#include "base/quantile.h"
#include "base/utc_now.h"
#include "common/machine.h"
#include "group/backoff.h"
#include "schedule/pass_order.h"
#include "schedule/queue_table.h"
#include "tune/model/task_cost.h"
#include "uniep/layer.h"
#include "workload/split.h"
#include "workload/synthetic.h"

namespace uniep::tool {
namespace {

using Clock = std::chrono::steady_clock;

// Reductions from 96 to 1024, those over the rows of an expert (of weight gradients) from 80; whole
// tiles and parts of them.
constexpr const char* kShapes[] = {
    "custom,tokens=1024,hidden=256,intermediate=128,experts=2,topk=2",
    "custom,tokens=256,hidden=256,intermediate=96,experts=8,topk=4",
    "custom,tokens=160,hidden=1024,intermediate=384,experts=4,topk=2",
    "custom,tokens=203,hidden=400,intermediate=512,experts=6,topk=3",
};
constexpr int kTileM[] = {16, 32, 64, 128};
constexpr int kTileN[] = {64, 128, 256};

/// A layer on one rank, and its steps.
class Sampler {
 public:
  explicit Sampler(const workload::ShapeSpec& spec)
      : layer_data_(workload::make_layer(spec, 1, 0, 0)),
        split_(layer_data_, 1),
        result_(workload::make_result(layer_data_, {})),
        layer_(split_.problem(), Communicator::cpu_group(1)[0]),
        plan_(layer_.plan(split_.topk_ids(0))) {}

  const RoutingPlan& plan() const { return plan_; }

  std::vector<PassStats> step(const Schedule& schedule) {
    const Saved saved = layer_.forward(plan_, split_.forward_args(0, result_), schedule);
    std::vector<PassStats> stats{layer_.last_pass()};
    layer_.backward(saved, split_.backward_args(0, result_), schedule);
    stats.push_back(layer_.last_pass());
    return stats;
  }

 private:
  LayerData layer_data_;
  workload::Split split_;
  LayerResult result_;
  Layer layer_;
  RoutingPlan plan_;
};

/// The sizes that a task's cost is a sum over: those of GemmCost, or of MoveCost.
std::vector<double> sizes_of(const PassView& v, const Task& task) {
  if (tune::is_product(task.stage)) {
    const tune::ProductSize s = tune::product_size(v, task);
    return tune::product_terms(static_cast<double>(s.m), static_cast<double>(s.n),
                               static_cast<double>(s.k));
  }
  return tune::move_terms(tune::move_size(v, task));
}

/// Sums of sizes of all tasks of each stage.
std::map<Stage, std::vector<double>> sizes_of(const PassView& v) {
  std::map<Stage, std::vector<double>> sums;
  for (int launch = 0; launch < num_launches(v); ++launch) {
    const Launch shape = launch_at(v, launch);
    for (const TrackList& tracks : {shape.comm, shape.main}) {
      const QueueTable queue(v, tracks);
      for_each_task(v, queue.view(), [&](const Task& task) {
        const std::vector<double> sizes = sizes_of(v, task);
        std::vector<double>& sum = sums[task.stage];
        sum.resize(sizes.size());
        for (std::size_t s = 0; s < sizes.size(); ++s) sum[s] += sizes[s];
      });
    }
  }
  return sums;
}

using Observations = std::map<Stage, std::vector<tune::Observation>>;

/// The least busy time of each stage over some steps: what else runs on the machine only adds.
void observe(Sampler& sampler, const Schedule& schedule, int repeats, Observations& observations) {
  std::map<std::pair<Pass, Stage>, double> least;
  for (int i = 0; i <= repeats; ++i) {
    for (const PassStats& stats : sampler.step(schedule)) {
      for (int s = 0; i > 0 && s < kNumStages; ++s) {
        const auto stage = static_cast<Stage>(s);
        if (stats[stage].tasks == 0) continue;
        const auto [at, is_new] = least.try_emplace({stats.pass, stage}, stats[stage].busy_s);
        if (!is_new) at->second = std::min(at->second, stats[stage].busy_s);
      }
    }
  }
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const PassOrder order(sampler.plan().data(), pass, schedule);
    for (const auto& [stage, sizes] : sizes_of(order.view())) {
      observations[stage].push_back({sizes, least.at({pass, stage})});
    }
  }
}

template <class F>
double least_seconds(int repeats, const F& f) {
  double least = 1e9;
  for (int i = 0; i < repeats; ++i) {
    const auto start = Clock::now();
    f();
    least = std::min(least, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return least;
}

double median_pass_seconds(Sampler& sampler, const Schedule& schedule) {
  std::vector<double> seconds;
  for (int i = 0; i < 60; ++i) seconds.push_back(sampler.step(schedule)[0].elapsed_s);
  return median(seconds);
}

/// What a pass and a launch cost besides their tasks: a layer of nearly nothing, in one and in four
/// launches.
void measure_launches(tune::MachineProfile& profile) {
  Sampler sampler(
      workload::parse_shape("custom,tokens=4,hidden=8,intermediate=8,experts=1,topk=1"));
  const double one = median_pass_seconds(sampler, parse_schedule("single"));
  const double four = median_pass_seconds(sampler, parse_schedule("sequential,dispatch_workers=3"));
  profile.launch_s = std::max(0.0, (four - one) / 3);
  profile.enter.fixed = std::max(0.0, one - profile.launch_s);
}

void measure_staging(tune::MachineProfile& profile) {
  constexpr std::size_t kBytes = 8 << 20;
  const std::vector<char> from(kBytes, 1);
  std::vector<char> to(kBytes);
  profile.enter.per_byte =
      least_seconds(10, [&] { std::memcpy(to.data(), from.data(), kBytes); }) / kBytes;
}

void measure_sleeps(tune::MachineProfile& profile) {
  const auto in_seconds = [](auto duration) {
    return std::chrono::duration<double>(duration).count();
  };
  std::vector<double> slack;
  for (int i = 0; i < 50; ++i) {
    const auto start = Clock::now();
    std::this_thread::sleep_for(Backoff::kFirstSleep);
    slack.push_back(in_seconds(Clock::now() - start - Backoff::kFirstSleep));
  }
  profile.wake = {.flag_s = 0,
                  .first_sleep_s = in_seconds(Backoff::kFirstSleep),
                  .longest_sleep_s = in_seconds(Backoff::kLongestSleep),
                  .sleep_slack_s = std::max(0.0, median(slack))};
}

}  // namespace

std::span<const char* const> profile_shapes() { return kShapes; }

int profile_steps() {
  return static_cast<int>(std::size(kShapes) * std::size(kTileM) * std::size(kTileN)) + 1;
}

tune::MeasuredProfile measure_cpu_profile(double effort, const std::function<void()>& progress) {
  const int repeats = std::max(1, static_cast<int>(8 * effort));
  Observations observations;
  for (const char* shape : kShapes) {
    Sampler sampler(workload::parse_shape(shape));
    for (const int tile_m : kTileM) {
      for (const int tile_n : kTileN) {
        // All cores at work, as in a real pass; stage by stage, so that none waits.
        Schedule schedule = parse_schedule("sequential");
        schedule.workers = usable_cpus();
        schedule.tile_m = tile_m;
        schedule.tile_n = tile_n;
        observe(sampler, schedule, repeats, observations);
        progress();
      }
    }
  }
  tune::MeasuredProfile measured;
  tune::MachineProfile& profile = measured.profile;
  profile.name = "measured";
  profile.device = to_string(this_machine());
  profile.source = "uniep profile, " + utc_now() + ", " + to_string(this_build());
  profile.cores = usable_cpus();
  std::vector<tune::ProductObservations> products;
  for (const auto& [stage, of_stage] : observations) {
    if (tune::is_product(stage)) products.push_back({stage, 0, of_stage});
  }
  profile.gemms = tune::fit_products(products, measured.fits);
  profile.dispatch = tune::fit_moves("dispatch", observations[Stage::kDispatch], measured.fits);
  profile.reduce = tune::fit_moves("reduce", observations[Stage::kReduce], measured.fits);
  measure_launches(profile);
  measure_staging(profile);
  measure_sleeps(profile);
  progress();
  profile = with_emulated_link(profile);
  return measured;
}

tune::MachineProfile with_emulated_link(tune::MachineProfile profile) {
  const auto gbps = env_link_gbps();
  profile.link = {};
  if (!gbps) return profile;
  profile.link.bytes_per_s = *gbps * 1e9;
  profile.link.latency_s = env_link_latency_us() * 1e-6;
  profile.link.exclusive = true;
  profile.wake.flag_s = profile.wake.sleep_slack_s;  // a sleeping thread delivers signals
  return profile;
}

}  // namespace uniep::tool
