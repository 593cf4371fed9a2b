#pragma once

#include <cstdint>
#include <vector>

#include "schedule/dependencies.h"

namespace uniep::tune {

/// What a rank hears from other hosts where the ranks of one host stand for those of all: others
/// are taken to do what they do at the same time. Who sends to the host i places behind it then
/// hears from the one i places ahead, so what comes from there in a piece has come when its own is
/// sent.
class HostMirror {
 public:
  /// `view` outlives this.
  explicit HostMirror(const PassView& view);

  /// Calls f(Signal) for what has come from other hosts now that a task for one is done.
  template <class F>
  void sent(const Task& task, F&& f) {
    const TileGrid grid = view_.stage(task.stage).grid;
    const auto host = task.host();
    const int piece = host_part(task).piece;
    if (--parts_left_[at(grid, host, piece)] == 0) piece_sent(grid, host, piece, f);
  }

  /// Calls f(Signal) for what comes in pieces of which this rank sends nothing.
  template <class F>
  void for_each_unanswered(F&& f) {
    for (const TileGrid grid : {TileGrid::kCrossings, TileGrid::kReturns}) {
      for (int host = 0; host < view_.layout.hosts; ++host) {
        if (host == view_.layout.host_of(view_.rank)) continue;
        for (int piece = 0; piece < view_.num_pieces(); ++piece) {
          if (parts_left_[at(grid, host, piece)] == 0) piece_sent(grid, host, piece, f);
        }
      }
    }
  }

 private:
  std::size_t at(TileGrid grid, int host, int piece) const {
    const std::int64_t of_grid = grid == TileGrid::kCrossings ? 0 : view_.layout.hosts;
    return static_cast<std::size_t>((of_grid + host) * view_.num_pieces() + piece);
  }

  /// The one as far ahead as `host` is behind this rank's.
  int opposite(int host) const {
    const int hosts = view_.layout.hosts;
    return (2 * view_.layout.host_of(view_.rank) - host + hosts) % hosts;
  }

  template <class F>
  void piece_sent(TileGrid grid, int host, int piece, F&& f) {
    const int from = opposite(host);
    if (grid == TileGrid::kCrossings) {
      tokens_come(view_.layout.relay(view_.rank, from), piece, f);
    } else if (--pieces_left_[static_cast<std::size_t>(host)] == 0) {
      rows_come(from, f);
    }
  }

  template <class F>
  void tokens_come(int source, int piece, F&& f) const {
    const std::uint32_t tokens = view_.crossing_tokens(source, piece);
    if (tokens == 0) return;
    const RankLayout& layout = view_.layout;
    for (int local = 0; local < layout.local_ranks; ++local) {
      f(Signal{CounterKind::kCrossed, layout.rank_at(layout.host_of(view_.rank), local),
               view_.crossing_index(source, piece), tokens});
    }
  }

  /// The last rows of nearly every token come in the last pieces, so all are taken to come then.
  template <class F>
  void rows_come(int from, F&& f) const {
    for (std::int64_t block = 0; block < view_.num_token_blocks(); ++block) {
      const std::int64_t index = block * view_.layout.hosts + from;
      const auto rows = static_cast<std::uint32_t>(view_.across->coming_back[index]);
      if (rows > 0) f(Signal{CounterKind::kReturned, view_.rank, index, rows});
    }
  }

  const PassView& view_;
  std::vector<std::uint32_t> parts_left_;  // tasks by grid, host and piece
  std::vector<int> pieces_left_;           // of rows, by host
};

}  // namespace uniep::tune
