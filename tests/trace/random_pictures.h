#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "simulate/scaling_plot.h"
#include "trace/plot.h"
#include "tuning/survey_plot.h"

namespace uniep::trace {

/// Inputs of every kind of picture, ordinary and extreme ones.
class RandomPictures {
 public:
  explicit RandomPictures(std::uint64_t seed) : rng_(seed) {}

  PlotInput run() {
    PlotInput input;
    input.page = page();
    input.num_ranks = one_of<int>({1, 2, 3, 8, 9, 64});
    const int per_rank = one_of<int>({1, 2, 16, 100});
    const std::int64_t most = one_of<std::int64_t>({0, 1, 40, 100'000, 20'000'000'000});
    for (int e = 0; e < per_rank * input.num_ranks; ++e) {
      input.rows_per_expert.push_back(one_of<int>({0, 1, 1}) * below(most));
    }
    const int workers = one_of<int>({0, 1, 4, 33, 400}) / (input.num_ranks > 8 ? 8 : 1);
    const double scale = one_of<double>({1, 50, 1e3, 1e6, 1e12});
    const bool backward = below(2) == 1;
    input.timeline.resize(static_cast<std::size_t>(input.num_ranks));
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      if (pass == Pass::kBackward && !backward) continue;
      input.passes.push_back(stats(input.num_ranks, pass, 1e-9 * scale));
      for (auto& events : input.timeline) add_events(events, pass, workers, scale);
    }
    return input;
  }

  tool::ScalingInput scaling() {
    tool::ScalingInput input;
    input.page = page();
    const int most = one_of<int>({1, 2, 7, 8, 64});
    for (int ranks = 1; ranks < most; ranks *= 2) input.ranks.push_back(ranks);
    input.ranks.push_back(most);
    input.gpus_per_node = one_of<int>({0, 1, 3, 8, 64});
    input.between_nodes = name();
    const double scale = one_of<double>({1e-9, 1e-4, 0.02, 3, 1e5});
    for (const char* direction : {"forward", "backward"}) {
      tool::ScalingCurve curve{.name = direction, .seconds = {}, .exposed = {}};
      for (std::size_t i = 0; i < input.ranks.size(); ++i) {
        curve.seconds.push_back(scale * share());
        curve.exposed.push_back(curve.seconds.back() * share());
      }
      input.curves.push_back(std::move(curve));
      if (below(3) == 0) break;
    }
    return input;
  }

  std::vector<tool::SurveyPoint> survey() {
    std::vector<tool::SurveyPoint> points(static_cast<std::size_t>(one_of<int>({0, 1, 2, 300})));
    const double scale = one_of<double>({1e-8, 1e-3, 1, 1e4}), spread = one_of<double>({0, 0.1, 1});
    for (tool::SurveyPoint& p : points) {
      p.predicted_s = scale * (1 + spread * share());
      p.measured_s = scale * (1 + spread * share() * one_of<double>({1, 1, 100}));
    }
    return points;
  }

  PageText page() {
    PageText text;
    text.title = name();
    for (std::int64_t i = below(6); i > 0; --i) text.notes.push_back(name());
    if (below(2) == 1) text.schedule = "launch=single," + name();
    return text;
  }

  /// Of a file, say: short or long, with spaces or without, in any bytes or in ASCII.
  std::string name() {
    const auto length = static_cast<std::size_t>(one_of<int>({1, 12, 80, 400, 5000}));
    const std::string letters = one_of<std::string>(
        {"W", "a", "ab, /", "<&>\"'", "\xff\xc3\xa9\n\x01 ", "\xe6\xbc\xa2", "--x=1,"});
    std::string s;
    while (s.size() < length) s += letters;
    return "uniep " + s;
  }

 private:
  std::vector<PassStats> stats(int ranks, Pass pass, double scale) {
    std::vector<PassStats> all(static_cast<std::size_t>(ranks));
    const bool none = below(6) == 0;
    for (PassStats& s : all) {
      s.pass = pass;
      for (StageStats& stage : s.stages) {
        if (none || below(4) == 0) continue;
        stage = {below(1'000'000), scale * share(), scale * share(), scale * share()};
      }
    }
    return all;
  }

  void add_events(std::vector<TimelineEvent>& events, Pass pass, int workers, double scale) {
    const auto time = [&] { return static_cast<std::int64_t>(scale * share()); };
    const std::int64_t start = 7'000'000'000 + time();
    for (int w = 0; w < workers; ++w) {
      if (below(8) == 0) continue;
      std::int64_t now = start;
      for (int i = 0; i < 3; ++i) {
        TimelineEvent e;
        e.pass = pass;
        e.stage = static_cast<Stage>(below(kNumStages));
        e.worker = e.processor = w;
        e.begin_ns = now;
        e.ready_ns = e.begin_ns + time();
        e.link_ns = below(2) * time();
        e.end_ns = e.ready_ns + e.link_ns + time();
        now = e.end_ns + below(2) * time();
        events.push_back(e);
      }
    }
  }

  double share() { return std::uniform_real_distribution<double>(0, 1)(rng_); }
  /// 0 to `most` - 1; 0 for 0.
  std::int64_t below(std::int64_t most) {
    return most < 2 ? 0 : std::uniform_int_distribution<std::int64_t>(0, most - 1)(rng_);
  }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<std::int64_t>(values.size()))];
  }

  std::mt19937_64 rng_;
};

}  // namespace uniep::trace
