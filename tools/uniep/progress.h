#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

namespace uniep::tool {

/// A progress bar on stderr, there only where stderr is a terminal and the work takes longer than
/// two seconds; gone without a trace when the object is.
class Progress {
 public:
  /// With a total of 0, or as long as no step is done, it shows the time alone.
  Progress(std::string label, std::int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// From any thread.
  void advance(std::int64_t steps = 1) { done_ += steps; }

 private:
  void redraw_until_stopped(const std::stop_token& stop);
  void draw(double seconds) const;

  std::string label_;
  std::int64_t total_;
  std::atomic<std::int64_t> done_ = 0;
  std::atomic<bool> drawn_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::jthread painter_;  // last: it uses all of the above
};

}  // namespace uniep::tool
