#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include "tune/model/min_heap.h"
#include "tune/model/ring.h"

namespace uniep::tune {

/// Cores that runnable workers share equally. With a count of 0 every worker has one of its own.
class Cores {
 public:
  explicit Cores(int count) : count_(count) {}

  /// Worker `unit` computes for `work` seconds of one core from `now` on.
  void start(int unit, double work, double now) {
    advance(now);
    running_.push(work, {progress_ + work, unit});
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
    double progress = 0;  // of every worker's core, at which this one is done
    int unit = 0;
    bool before(const Running& other) const {
      return static_cast<bool>((progress < other.progress) |
                               ((progress == other.progress) & (unit < other.unit)));
    }
  };

  /// Who is done first. Those with equal work are done in the order in which they began, so they
  /// stand in line; the heap is for amounts of work that no line is free for.
  class Order {
   public:
    Order() { heads_.fill(kNobody); }

    bool empty() const { return size_ == 0; }
    std::size_t size() const { return size_; }
    const Running& top() const { return heads_[first_]; }

    void push(double work, const Running& r) {
      ++size_;
      const std::size_t line = line_of(work);
      if (line < kLines) {
        work_[line] = work;
        stand_in(lines_[line], r);
        heads_[line] = lines_[line].front();
      } else {
        heap_.push(r);
        heads_[kLines] = heap_.top();
      }
      if (r.before(heads_[first_])) first_ = line;
    }
    void pop() {
      --size_;
      if (first_ < kLines) {
        Ring<Running>& line = lines_[first_];
        line.pop_front();
        heads_[first_] = line.empty() ? kNobody : line.front();
      } else {
        heap_.pop();
        heads_[kLines] = heap_.empty() ? kNobody : heap_.top();
      }
      first_ = 0;
      for (std::size_t i = 1; i <= kLines; ++i)
        first_ = heads_[i].before(heads_[first_]) ? i : first_;
    }

   private:
    static constexpr std::size_t kLines = 7;
    static constexpr Running kNobody{std::numeric_limits<double>::infinity(),
                                     std::numeric_limits<int>::max()};

    /// The line for this amount of work, or one that is free, or kLines.
    std::size_t line_of(double work) const {
      std::size_t free = kLines;
      for (std::size_t i = 0; i < kLines; ++i) {
        if (work_[i] == work) return i;
        if (free == kLines && lines_[i].empty()) free = i;
      }
      return free;
    }
    static void stand_in(Ring<Running>& line, const Running& r) {
      line.push_back(r);
      for (std::size_t i = line.size() - 1; i > 0 && line[i].before(line[i - 1]); --i) {
        std::swap(line[i], line[i - 1]);  // began at the same time
      }
    }

    std::size_t size_ = 0;
    std::size_t first_ = 0;                    // among the heads
    std::array<Running, kLines + 1> heads_{};  // of the lines, and of the heap
    std::array<double, kLines> work_{};
    std::array<Ring<Running>, kLines> lines_;
    MinHeap<Running> heap_;
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
  Order running_;
};

}  // namespace uniep::tune
