#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace uniep::tool {

/// How far some work has come. A total of 0: nobody knows how much there is.
struct WorkDone {
  std::int64_t done = 0;
  std::int64_t total = 0;
  double elapsed_s = 0;
};

/// "running 2 ranks [#####.....] 50 %, 17 s left" in at most `columns` columns: the bar shrinks
/// first, then the label. As long as nothing is done, the time that it took so far takes the place
/// of the share and the time left.
std::string progress_bar(std::string_view label, const WorkDone& work, std::size_t columns);

/// "running 2 ranks: 50 %, 17 s left", likewise.
std::string progress_sentence(std::string_view label, const WorkDone& work, std::size_t columns);

/// "17 s", "2:05", "1:02:03".
std::string duration_text(double seconds);

/// What people see on stderr of work that takes long. On a terminal a bar after two seconds, gone
/// without a trace when the object is; elsewhere a line ("# ...") after five seconds and every ten
/// from then on. Work that takes less shows nothing. May be used from any thread.
class Progress {
 public:
  Progress(std::string label, std::int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(std::int64_t steps = 1);
  /// How much is done, where that is no sum of steps.
  void set_done(std::int64_t done);
  /// What is being done now.
  void set_label(std::string label);

  /// While it lives nothing is drawn, and what was drawn is gone: something else is printed.
  class Pause {
   public:
    explicit Pause(Progress& progress);

   private:
    std::unique_lock<std::mutex> lock_;
  };

 private:
  using Clock = std::chrono::steady_clock;

  void show_until_stopped(const std::stop_token& stop);
  void show();
  void erase();

  const bool on_terminal_;
  const std::int64_t total_;
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;  // of what follows
  std::string label_;
  std::int64_t done_ = 0;
  bool drawn_ = false;
  std::condition_variable_any stopped_;
  std::jthread painter_;  // last: it uses all of the above
};

}  // namespace uniep::tool
