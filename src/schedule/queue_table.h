#pragma once

#include <vector>

#include "schedule/queue.h"

namespace uniep {

/// The table behind a QueueView.
class QueueTable {
 public:
  QueueTable(const PassView& view, const TrackList& tracks);
  QueueView view() const {
    return {blocks_.data(), begin_.data(), static_cast<int>(blocks_.size())};
  }

 private:
  std::vector<QueueBlock> blocks_;
  std::vector<std::int64_t> begin_;
};

}  // namespace uniep
