#pragma once

#include <algorithm>
#include <limits>
#include <queue>
#include <vector>

namespace uniep::tune {

/// Cores that runnable workers share equally. With a count of 0 every worker has one of its own.
class Cores {
 public:
  explicit Cores(int count) : count_(count) {}

  /// Worker `unit` computes for `work` seconds of one core from `now` on.
  void start(int unit, double work, double now) {
    advance(now);
    running_.push({progress_ + work, unit});
  }

  /// When the next of them is done; infinity where none computes.
  double next() const {
    if (running_.empty()) return std::numeric_limits<double>::infinity();
    return now_ + std::max(0.0, running_.top().progress - progress_) / rate();
  }

  /// Takes the one that is done at `next()`.
  int pop() {
    const double when = next();
    const Running done = running_.top();
    advance(when);
    running_.pop();
    progress_ = std::max(progress_, done.progress);
    return done.unit;
  }

 private:
  struct Running {
    double progress;  // of every worker's core, at which this one is done
    int unit;
    bool operator>(const Running& other) const {
      return progress != other.progress ? progress > other.progress : unit > other.unit;
    }
  };

  double rate() const {
    const auto running = static_cast<double>(running_.size());
    return count_ == 0 ? 1 : std::min(1.0, count_ / running);
  }
  void advance(double now) {
    if (!running_.empty()) progress_ += (now - now_) * rate();
    now_ = now;
  }

  const int count_;
  double now_ = 0;
  double progress_ = 0;  // seconds of a core that each running worker has had since the beginning
  std::priority_queue<Running, std::vector<Running>, std::greater<>> running_;
};

}  // namespace uniep::tune
