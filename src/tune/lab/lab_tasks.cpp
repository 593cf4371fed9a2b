#include "tune/lab/lab_tasks.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "base/quantile.h"
#include "schedule/pass_order.h"
#include "tune/lab/timeline_samples.h"

namespace uniep::tune {
namespace {

// Reductions from 512 to 7168, and over 400 to 4096 rows an expert; tiles of the last shape are
// partial in rows and columns.
constexpr const char* kShapes[] = {
    "custom,tokens=4096,hidden=2048,intermediate=768,experts=8,topk=4",
    "custom,tokens=4096,hidden=4096,intermediate=1536,experts=8,topk=2",
    "custom,tokens=2048,hidden=7168,intermediate=512,experts=16,topk=4",
    "custom,tokens=4096,hidden=1024,intermediate=3072,experts=2,topk=2",
    "custom,tokens=1600,hidden=2880,intermediate=1472,experts=16,topk=4",
};
constexpr int kPullTokens[] = {4, 16};
// Rows to reduce that no cache holds, as in layers that are trained.
constexpr const char* kReduceShapes[] = {
    "custom,tokens=16384,hidden=4096,intermediate=64,experts=8,topk=2",
    "custom,tokens=16384,hidden=2048,intermediate=64,experts=8,topk=8",
};
constexpr int kReduceBlocks[] = {8, 32};

/// Times by what they are times of.
template <class Key>
using Classes = std::map<Key, std::vector<double>>;
using TileKey = std::tuple<Stage, std::int64_t, std::int64_t, std::int64_t>;
using MoveKey = std::pair<std::int64_t, std::int64_t>;  // items, bytes

MoveKey key_of(const MoveSize& size) { return {size.items, size.bytes}; }

/// All figures of one layer.
class LayerSampler {
 public:
  LayerSampler(ProfileLab& lab, const LabOptions& options, TaskFigures& figures)
      : lab_(lab), options_(options), figures_(figures) {}

  void sample_products(int tile_n) {
    Schedule schedule = parse_schedule("sequential", default_schedule(Backend::kCuda));
    schedule.tile_n = tile_n;
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      const PassOrder order(lab_.plan(), pass, schedule);
      const int busy = busy_passes(pass, schedule);
      Classes<TileKey> tiles;
      std::vector<double> enters;
      for (int i = 0; i < options_.repeats; ++i) {
        const LabPass timed = lab_.run(pass, schedule, busy);
        add_turns(order.view(), timed, tiles);
        enters.push_back(timed.enter_s);
        for (const double gap : launch_gaps(timed.events)) figures_.gaps.push_back(gap);
        figures_.workers = timed.workers;
      }
      keep_tiles(schedule, tiles);
      const PassView& v = order.view();
      figures_.enter.push_back({move_terms({0, published_bytes(v, v.tokens)}), median(enters)});
    }
  }

  /// Samples dispatch beside products, as it runs in all schedules but one.
  void sample_dispatch(int pull_tokens) {
    Schedule schedule = parse_schedule("single", default_schedule(Backend::kCuda));
    schedule.pull_tokens = pull_tokens;
    sample_moves(schedule, Stage::kDispatch, &TaskSample::busy, figures_.dispatch);
  }

  /// Token blocks are small, so that every worker has several.
  void sample_reduce(int token_block) {
    Schedule schedule = parse_schedule("sequential", default_schedule(Backend::kCuda));
    schedule.token_block = token_block;
    sample_moves(schedule, Stage::kReduce, &TaskSample::turn, figures_.reduce);
  }

 private:
  /// As many passes as take `busy_s`.
  int busy_passes(Pass pass, const Schedule& schedule) {
    constexpr double kMost = 1000;
    lab_.run(pass, schedule, 1);  // the first also loads kernels and takes memory
    const double one_s = lab_.run(pass, schedule, 1).elapsed_s;
    return static_cast<int>(std::clamp(options_.busy_s / one_s, 1.0, kMost));
  }

  static void add_turns(const PassView& v, const LabPass& timed, Classes<TileKey>& tiles) {
    for (int i = 0; i < kNumStages; ++i) {
      const auto stage = static_cast<Stage>(i);
      if (!is_product(stage)) continue;
      for (const TaskSample& s : task_samples(v, stage, timed.events)) {
        if (s.turn <= 0) continue;
        const ProductSize size = product_size(v, s.task);
        tiles[{stage, size.m, size.n, size.k}].push_back(s.turn);
      }
    }
  }

  void keep_tiles(const Schedule& schedule, const Classes<TileKey>& tiles) {
    for (const auto& [key, turns] : tiles) {
      const auto& [stage, m, n, k] = key;
      figures_.tiles.push_back({stage, schedule.tile_m, schedule.tile_n, {m, n, k}, median(turns)});
    }
  }

  /// Samples only tasks that followed another on their worker.
  void sample_moves(const Schedule& schedule, Stage stage, double TaskSample::*seconds,
                    std::vector<Observation>& to) {
    const PassOrder order(lab_.plan(), Pass::kForward, schedule);
    const int busy = busy_passes(Pass::kForward, schedule);
    Classes<MoveKey> moves;
    for (int i = 0; i < options_.repeats; ++i) {
      const LabPass timed = lab_.run(Pass::kForward, schedule, busy);
      for (const TaskSample& s : task_samples(order.view(), stage, timed.events)) {
        if (s.turn > 0 && s.*seconds > 0) {
          moves[key_of(move_size(order.view(), s.task))].push_back(s.*seconds);
        }
      }
    }
    keep_moves(moves, to);
  }

  static void keep_moves(const Classes<MoveKey>& moves, std::vector<Observation>& to) {
    for (const auto& [key, seconds] : moves) {
      to.push_back({move_terms({key.first, key.second}), median(seconds)});
    }
  }

  ProfileLab& lab_;
  const LabOptions& options_;
  TaskFigures& figures_;
};

}  // namespace

TaskFigures measure_tasks(ProfileLab& lab, const LabOptions& options) {
  TaskFigures figures;
  for (const char* shape : kShapes) {
    lab.set_up(shape, false);
    LayerSampler sampler(lab, options, figures);
    for (const int tile_n : {128, 256}) sampler.sample_products(tile_n);
    for (const int pull_tokens : kPullTokens) sampler.sample_dispatch(pull_tokens);
    options.progress();
  }
  for (const char* shape : kReduceShapes) {
    lab.set_up(shape, false);
    LayerSampler sampler(lab, options, figures);
    for (const int token_block : kReduceBlocks) sampler.sample_reduce(token_block);
    options.progress();
  }
  // The items of a reduce task are its tokens, and bytes follow from them: bytes alone count.
  for (Observation& o : figures.reduce) o.sizes[1] = 0;
  return figures;
}

int task_steps() { return static_cast<int>(std::size(kShapes) + std::size(kReduceShapes)); }

}  // namespace uniep::tune
