#pragma once

#include <span>
#include <vector>

#include "schedule/dependencies.h"

namespace uniep::tune {

/// What the tiles of the stage that pushes push. All column tiles of a row tile push the same
/// rows, and reduce waits for whole rows: so a row tile's counters are advanced once, when the last
/// of its column tiles is done, which nobody can tell from many small steps.
class PushedTiles {
 public:
  explicit PushedTiles(const PassView& v);

  /// Rows that a row tile pushes to one rank; those of its counters there which they fill.
  struct Run {
    int rank = 0;
    std::int64_t rows = 0;
    std::int64_t first_arrival = 0;
    std::int64_t end_arrival = 0;
    double visible = 0;  ///< when the latest of its column tiles so far will be
  };
  struct Arrival {
    std::int64_t index = 0;  ///< of the counter
    std::uint32_t elements = 0;
    CounterKind kind = CounterKind::kArrived;
  };

  std::span<Run> runs(std::int64_t tile) {
    const auto t = static_cast<std::size_t>(tile);
    return std::span(runs_).subspan(run_begin_[t], run_begin_[t + 1] - run_begin_[t]);
  }
  std::span<const Arrival> arrivals(const Run& run) const {
    return std::span(arrivals_).subspan(
        static_cast<std::size_t>(run.first_arrival),
        static_cast<std::size_t>(run.end_arrival - run.first_arrival));
  }

  /// Columns of column tile `n`.
  std::int64_t columns(std::int64_t n) const { return column_tile(grid_, n).count; }

  /// Notes that a column tile of `tile` is done; whether it was the last.
  bool finish(std::int64_t tile) { return --left_[static_cast<std::size_t>(tile)] == 0; }

 private:
  void add(const PassView& v, std::int64_t tile);

  Stage stage_;
  StageGrid grid_;
  std::vector<std::size_t> run_begin_;  // [tiles + 1]
  std::vector<Run> runs_;
  std::vector<Arrival> arrivals_;
  std::vector<std::int64_t> left_;  // [tiles]: column tiles
};

}  // namespace uniep::tune
