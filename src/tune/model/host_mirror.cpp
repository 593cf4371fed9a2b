#include "tune/model/host_mirror.h"

namespace uniep::tune {

HostMirror::HostMirror(const PassView& view)
    : view_(view), pieces_left_(static_cast<std::size_t>(view.layout.hosts), view.num_pieces()) {
  for (const TileGrid grid : {TileGrid::kCrossings, TileGrid::kReturns}) {
    for (int host = 0; host < view.layout.hosts; ++host) {
      for (int piece = 0; piece < view.num_pieces(); ++piece) {
        parts_left_.push_back(parts_of_piece(view, grid, host, piece));
      }
    }
  }
}

}  // namespace uniep::tune
