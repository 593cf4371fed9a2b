#include "tune/lab/timeline_samples.h"

#include <algorithm>
#include <limits>
#include <map>

namespace uniep::tune {
namespace {

double seconds(std::int64_t ns) { return 1e-9 * static_cast<double>(ns); }

Task pull_task(const PassView& v, Stage stage, std::int64_t first_pull) {
  const std::int64_t* blocks = v.pull_begin;
  const std::int64_t* next = std::upper_bound(blocks, blocks + v.num_blocks() + 1, first_pull);
  return {.stage = stage,
          .expert = v.expert_of_block(static_cast<int>(next - blocks) - 1),
          .tile = first_pull,
          .m = first_pull,
          .n = min_of<std::int64_t>(v.schedule.pull_tokens, *next - first_pull)};
}

}  // namespace

Task task_numbered(const PassView& v, Stage stage, std::int64_t tile) {
  const StageView& s = v.stage(stage);
  Task task{.stage = stage, .tile = tile, .m = tile};
  switch (s.grid) {
    case TileGrid::kPulls:
      return pull_task(v, stage, tile);
    case TileGrid::kRowTiles:
      task.n = tile % s.column_tiles;
      task.m = tile / s.column_tiles;
      task.expert = v.tiles[task.m].expert;
      break;
    case TileGrid::kWeightTiles: {
      const std::int64_t rows = ceil_div(s.rows, v.schedule.tile_m);
      task.n = tile % s.column_tiles;
      task.m = tile / s.column_tiles % rows;
      task.expert = static_cast<int>(tile / s.column_tiles / rows);
      break;
    }
    case TileGrid::kTokenBlocks:
    case TileGrid::kCrossings:
    case TileGrid::kReturns:
    case TileGrid::kNone:
      break;
  }
  return task;
}

std::vector<TaskSample> task_samples(const PassView& v, Stage stage,
                                     std::span<const TimelineEvent> events) {
  std::vector<const TimelineEvent*> sorted;
  for (const TimelineEvent& e : events) {
    if (e.pass == v.pass && e.stage == stage) sorted.push_back(&e);
  }
  std::ranges::stable_sort(sorted, {}, &TimelineEvent::end_ns);
  std::vector<TaskSample> samples;
  std::map<std::pair<int, int>, std::int64_t> ends;  // of each worker's last task in a launch
  for (const TimelineEvent* e : sorted) {
    const auto [last, is_first] = ends.try_emplace({e->launch, e->worker}, e->end_ns);
    samples.push_back({.task = task_numbered(v, stage, e->tile),
                       .begin = seconds(e->begin_ns),
                       .end = seconds(e->end_ns),
                       .busy = seconds(e->end_ns - e->ready_ns - e->link_ns),
                       .turn = is_first ? 0 : seconds(e->end_ns - last->second)});
    last->second = e->end_ns;
  }
  return samples;
}

std::vector<double> launch_gaps(std::span<const TimelineEvent> events) {
  struct Span {
    std::int64_t begin = std::numeric_limits<std::int64_t>::max();
    std::int64_t end = 0;
  };
  std::map<int, Span> launches;
  for (const TimelineEvent& e : events) {
    Span& span = launches[e.launch];
    span.begin = std::min(span.begin, e.begin_ns);
    span.end = std::max(span.end, e.end_ns);
  }
  std::vector<double> gaps;
  for (auto at = launches.begin(); at != launches.end(); ++at) {
    const auto next = std::next(at);
    if (next != launches.end()) gaps.push_back(seconds(next->second.begin - at->second.end));
  }
  return gaps;
}

StageSpan stage_span(Stage stage, std::span<const TimelineEvent> events) {
  std::int64_t begin = std::numeric_limits<std::int64_t>::max();
  std::int64_t end = 0;
  for (const TimelineEvent& e : events) {
    if (e.stage != stage) continue;
    begin = std::min(begin, e.begin_ns);
    end = std::max(end, e.end_ns);
  }
  if (end == 0) return {};
  return {seconds(end), seconds(end - begin)};
}

}  // namespace uniep::tune
