#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace uniep {

/// Pauses between looks at a condition: yields at first, then sleeps for longer and longer, so that
/// waiting workers leave the cores to those that compute (there may be more workers than cores).
class Backoff {
 public:
  void pause() {
    if (yields_ < 16) {
      ++yields_;
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(sleep_ * 2, std::chrono::microseconds(500));
  }

 private:
  int yields_ = 0;
  std::chrono::microseconds sleep_{20};
};

}  // namespace uniep
