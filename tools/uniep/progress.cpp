#include "progress.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <utility>

#include "base/check.h"

namespace uniep::tool {
namespace {

constexpr std::chrono::seconds kPatience{2};
constexpr std::chrono::milliseconds kInterval{200};
constexpr const char* kEraseLine = "\r\x1b[K";

}  // namespace

Progress::Progress(std::string label, std::int64_t total)
    : label_(std::move(label)), total_(total) {
  if (isatty(STDERR_FILENO) == 0) return;
  painter_ = std::jthread([this](const std::stop_token& stop) { redraw_until_stopped(stop); });
}

Progress::~Progress() {
  if (!painter_.joinable()) return;
  painter_.request_stop();
  painter_.join();
  if (drawn_) std::fputs(kEraseLine, stderr);
}

void Progress::redraw_until_stopped(const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock lock(mutex);
  const auto never = [] { return false; };
  auto next = start_ + kPatience;
  while (true) {
    stopped.wait_until(lock, stop, next, never);
    if (stop.stop_requested()) return;
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
    draw(elapsed.count());
    drawn_ = true;
    next += kInterval;
  }
}

void Progress::draw(double seconds) const {
  const std::int64_t done = std::min<std::int64_t>(done_, total_);
  std::string line = kEraseLine + label_;
  if (total_ > 0 && done > 0) {
    constexpr int kCells = 30;
    const auto filled = static_cast<std::size_t>(kCells * done / total_);
    line += cat(" [", std::string(filled, '#'), std::string(kCells - filled, '.'), "] ",
                100 * done / total_, '%');
  }
  line += cat(' ', static_cast<int>(seconds), " s");
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace uniep::tool
