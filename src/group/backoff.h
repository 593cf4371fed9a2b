#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace uniep {

/// Pauses between looks at a condition: yields at first, then sleeps for longer and longer, so that
/// waiting workers leave the cores to those that compute (there may be more workers than cores).
class Backoff {
 public:
  static constexpr std::chrono::microseconds kFirstSleep{20};
  static constexpr std::chrono::microseconds kLongestSleep{500};

  void pause() {
    if (yields_ < 16) {
      ++yields_;
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(sleep_ * 2, kLongestSleep);
  }

 private:
  int yields_ = 0;
  std::chrono::microseconds sleep_ = kFirstSleep;
};

}  // namespace uniep
