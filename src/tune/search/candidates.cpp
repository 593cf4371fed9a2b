#include "tune/search/candidates.h"

#include <algorithm>
#include <chrono>

#include "tune/model/cost_model.h"
#include "tune/model/parallel.h"

namespace uniep::tune {
namespace {

using Clock = std::chrono::steady_clock;

/// What a profile says of a layer's pass.
class Model {
 public:
  Model(std::span<const RoutingPlan> plans, Pass pass, const MachineProfile& profile,
        const Topology& topology)
      : plans_(plans), pass_(pass), profile_(profile), topology_(topology) {}

  double operator()(const Schedule& s) const {
    return simulate(plans_, pass_, s, profile_, {.topology = topology_}).seconds;
  }

 private:
  std::span<const RoutingPlan> plans_;
  Pass pass_;
  const MachineProfile& profile_;
  const Topology& topology_;
};

/// Seconds of a prediction, where all cores make some.
double seconds_of_one(const Model& model, const Schedule& schedule) {
  const auto start = Clock::now();
  const std::size_t threads = model_threads();
  for_each_in_parallel(threads, [&](std::size_t) { model(schedule); });
  const std::chrono::duration<double> spent = Clock::now() - start;
  return std::max(1e-6, spent.count() / static_cast<double>(threads));
}

}  // namespace

std::vector<Ranked> rank_by_model(std::span<const RoutingPlan> plans, Pass pass, const Space& space,
                                  const std::vector<Schedule>& known, const MachineProfile& profile,
                                  const Topology& topology, double seconds, std::uint64_t seed) {
  // Never so long that other ranks would give up waiting.
  constexpr double kMostSeconds = 20;
  constexpr double kFewest = 12, kMost = 2000;
  const Model model(plans, pass, profile, topology);
  const double most_seconds = std::min(seconds, kMostSeconds);
  const double affordable = most_seconds / seconds_of_one(model, known.front());
  if (affordable < kFewest) return {};
  const int evaluations = static_cast<int>(std::min(affordable, kMost));
  return search_model(
      space, known, model,
      {.samples = evaluations / 3,
       .climbs = 4,
       .evaluations = evaluations,
       .seconds =
           most_seconds,  // other schedules may have more tasks than the first, and take longer
       .seed = seed});
}

std::vector<SessionCandidate> candidates_of(const Space& space, const std::vector<Schedule>& known,
                                            const std::vector<Ranked>& by_model, std::size_t count,
                                            std::uint64_t seed) {
  std::vector<SessionCandidate> all;
  const auto add = [&](const Schedule& s) {
    const bool is_new = std::ranges::find(all, s, &SessionCandidate::schedule) == all.end();
    if (!is_new) return false;
    const auto predicted = std::ranges::find(by_model, s, &Ranked::schedule);
    const double seconds = predicted == by_model.end() ? 0 : predicted->seconds;
    all.push_back({.schedule = s, .predicted_s = seconds, .seconds = {}, .rejected = false});
    return true;
  };
  for (const Schedule& s : known) add(s);
  for (const Ranked& r : distinct(by_model, count)) add(r.schedule);
  Space::Rng rng(seed);
  std::size_t added = 0;
  for (int tries = 0; by_model.empty() && added < count && tries < 1000; ++tries) {
    added += add(space.sample(rng)) ? 1 : 0;
  }
  return all;
}

}  // namespace uniep::tune
