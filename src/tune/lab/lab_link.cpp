#include "tune/lab/lab_link.h"

#include <algorithm>

#include "base/check.h"
#include "base/quantile.h"
#include "schedule/pass_order.h"
#include "tune/lab/timeline_samples.h"

namespace uniep::tune {
namespace {

constexpr std::int64_t kPullWidths[] = {1024, 4096, 7168};
constexpr int kPullWorkers[] = {4, 8, 16, 32};
constexpr std::int64_t kSegmentBytes[] = {128, 256, 512};  // of a pushed row in a tile
constexpr int kMostPeers = 8;  // that a token of the flags' layer goes to
constexpr int kFlagPasses = 40;
constexpr int kFlagBusyPasses = 4;  // take up what the ranks are apart

Schedule cuda_schedule(const std::string& text) {
  return parse_schedule(text, default_schedule(Backend::kCuda));
}

/// Bytes of so many elements as tokens are exchanged.
std::int64_t token_bytes(std::int64_t elements) {
  return elements * bytes_of(kLayerGraph[Tensor::kTokens].element);
}

/// Bytes that this rank pulls from others, a token at a time.
double pulled_bytes(const PlanData& plan) {
  const auto remote =
      std::ranges::count_if(plan.pulls, [&](const Pull& pull) { return pull.source != plan.rank; });
  return static_cast<double>(remote * token_bytes(plan.problem.hidden));
}

/// Bytes that it pushes to others, a row at a time.
double pushed_bytes(const PlanData& plan) {
  std::int64_t rows = 0;
  for (std::size_t e = 0; e < plan.tokens_per_expert.size(); ++e) {
    const auto first = plan.row_origin.begin() + plan.segment_begin[e];
    rows += std::count_if(first, first + plan.tokens_per_expert[e],
                          [&](const RowOrigin& o) { return o.source != plan.rank; });
  }
  return static_cast<double>(rows * token_bytes(plan.problem.hidden));
}

class LinkLab {
 public:
  LinkLab(ProfileLab& lab, const LabOptions& options, MeasuredProfile& found)
      : lab_(lab), options_(options), found_(found) {}

  /// Stage by stage and every worker dispatching: what the link lets through.
  void measure_pulls() {
    double best = 0;
    for (const std::int64_t width : kPullWidths) {
      const double rate =
          rate_of(cat("pulls of ", token_bytes(width), " bytes"), Stage::kDispatch,
                  {2048, 8192, 16384}, width, cuda_schedule("sequential,pull_tokens=4"));
      best = std::max(best, rate);
    }
    found_.profile.link.pull_bytes_per_s = best;
    for (const int workers : kPullWorkers) {
      Schedule schedule = cuda_schedule("two-kernel");
      schedule.dispatch_workers = workers;
      const Transfer t = transfer(Stage::kDispatch, 8192, 4096, schedule);
      add_figure(
          cat("pulls of ", token_bytes(4096), " bytes, whole passes, dispatch_workers=", workers),
          t.bytes / t.seconds);
    }
  }

  /// Products so short that tiles wait for their pushes.
  void measure_pushes() {
    LinkProfile& link = found_.profile.link;
    link.push.points.clear();
    for (const std::int64_t bytes : kSegmentBytes) {
      Schedule schedule = cuda_schedule("sequential");
      const std::int64_t elements = bytes / token_bytes(1);
      schedule.tile_n = elements == 256 ? 256 : 128;
      const bool narrow = elements < schedule.tile_n;  // only where a row has no more
      const std::int64_t width = narrow ? elements : 4096;
      const std::vector<std::int64_t> tokens =
          narrow ? std::vector<std::int64_t>{65536, 196608, 393216}
                 : std::vector<std::int64_t>{4096, 8192, 16384};
      const double rate = rate_of(cat("pushes, ", bytes, " bytes of a row in a tile"), Stage::kFc2,
                                  tokens, width, schedule);
      link.push.points.push_back({static_cast<double>(bytes), rate});
      link.bytes_per_s = std::max(rate, link.bytes_per_s);
    }
  }

  /// A layer of one tile a rank takes longer together than alone by two flags and two ways over the
  /// link, out and back, which are taken to be equal.
  void measure_flags() {
    const int ranks = lab_.ranks();
    const double together =
        least_pass(cat("custom,tokens=8,hidden=64,intermediate=64,experts=", ranks,
                       ",topk=", std::min(ranks, kMostPeers)),
                   true);
    const double alone =
        least_pass("custom,tokens=8,hidden=64,intermediate=64,experts=1,topk=1", false);
    const double each = std::max(0.0, together - alone) / 4;
    found_.profile.link.latency_s = each;
    found_.profile.wake.flag_s = each;
  }

  void measure_products_beside() {
    lab_.set_up(cat("custom,tokens=8192,hidden=2048,intermediate=768,experts=", 16 * lab_.ranks(),
                    ",topk=4"),
                true);
    const double by_itself = whole_tile(cuda_schedule("sequential"), false);
    const double beside = whole_tile(cuda_schedule("single"), true);
    found_.profile.beside_link = std::max(1.0, beside / by_itself);
  }

 private:
  void add_figure(const std::string& what, double rate) { found_.link.push_back({what, rate}); }

  /// Bytes that a stage moves between ranks, and how long it took on the rank that was the least
  /// held up by others.
  Transfer transfer(Stage stage, std::int64_t tokens, std::int64_t width,
                    const Schedule& schedule) {
    lab_.set_up(cat("custom,tokens=", tokens, ",hidden=", width,
                    ",intermediate=64,experts=", 8 * lab_.ranks(), ",topk=1"),
                true);
    const PlanData& plan = lab_.plan();
    std::vector<double> seconds;
    for (int i = 0; i < options_.repeats; ++i) {
      const LabPass timed = lab_.run(Pass::kForward, schedule, options_.busy_passes);
      seconds.push_back(std::ranges::min(lab_.gather(stage_span(stage, timed.events).seconds)));
    }
    const double bytes = stage == Stage::kDispatch ? pulled_bytes(plan) : pushed_bytes(plan);
    return {median(lab_.gather(bytes)), median(seconds)};
  }

  double rate_of(const std::string& what, Stage stage, const std::vector<std::int64_t>& tokens,
                 std::int64_t width, const Schedule& schedule) {
    std::vector<Transfer> transfers;
    for (const std::int64_t count : tokens) {
      transfers.push_back(transfer(stage, count, width, schedule));
    }
    const double seconds = fit_byte(what, transfers, found_.fits);
    require(seconds > 0, ErrorCode::kUnsupported, "the speed of ", what,
            " cannot be told: more bytes took no longer; a machine that runs nothing else is "
            "needed");
    add_figure(what, 1 / seconds);
    return 1 / seconds;
  }

  double least_pass(const std::string& shape, bool together) {
    lab_.set_up(shape, together);
    double least = 1e9;
    for (int i = 0; i < kFlagPasses; ++i) {
      const double elapsed =
          lab_.run(Pass::kForward, cuda_schedule("single,pull_tokens=8"), kFlagBusyPasses)
              .elapsed_s;
      least = std::min(least, std::ranges::min(lab_.gather(elapsed)));
    }
    return least;
  }

  /// Median time of whole fc1 tiles, 0 of none; `beside`: of those done before dispatch was.
  double whole_tile(const Schedule& schedule, bool beside) {
    const PassOrder order(lab_.plan(), Pass::kForward, schedule);
    const PassView& v = order.view();
    std::vector<double> seconds;
    for (int i = 0; i < options_.repeats; ++i) {
      const LabPass timed = lab_.run(Pass::kForward, schedule, options_.busy_passes);
      const double pulled = stage_span(Stage::kDispatch, timed.events).end;
      for (const TaskSample& s : task_samples(v, Stage::kFc1, timed.events)) {
        const bool whole = v.tiles[s.task.m].rows == v.schedule.tile_m;
        if (whole && (!beside || s.end <= pulled)) seconds.push_back(s.busy);
      }
    }
    return median(seconds);
  }

  ProfileLab& lab_;
  const LabOptions& options_;
  MeasuredProfile& found_;
};

}  // namespace

void measure_link(ProfileLab& lab, const LabOptions& options, MeasuredProfile& found) {
  found.profile.link = {};
  LinkLab link(lab, options, found);
  link.measure_pulls();
  options.progress();
  link.measure_pushes();
  options.progress();
  link.measure_flags();
  link.measure_products_beside();
  options.progress();
}

int link_steps() { return 3; }

}  // namespace uniep::tune
