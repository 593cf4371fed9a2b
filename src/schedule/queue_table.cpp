#include "schedule/queue_table.h"

namespace uniep {

QueueTable::QueueTable(const PassView& view, const TrackList& tracks) : begin_{0} {
  for_each_block(view, tracks, [&](const QueueBlock& b) {
    blocks_.push_back(b);
    begin_.push_back(begin_.back() + block_draws(view, b));
  });
}

}  // namespace uniep
