#include "common/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "common/text_columns.h"

namespace uniep::tool {
namespace {

using std::chrono::milliseconds;

/// When something is shown first, and how often from then on.
struct Pace {
  milliseconds first, interval;
};
constexpr Pace kOnTerminal{milliseconds(2000), milliseconds(200)};
constexpr Pace kElsewhere{milliseconds(5000), milliseconds(10000)};

constexpr const char* kEraseLine = "\r\x1b[K";
constexpr std::size_t kMostCells = 30;
constexpr std::size_t kFewestCells = 4;   // fewer say nothing that the share does not
constexpr std::size_t kAnyColumns = 80;   // of a terminal that does not say
constexpr std::size_t kLineColumns = 98;  // behind "# "

/// Asked each time: a terminal's size changes.
std::size_t terminal_columns() {
  winsize size{};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kAnyColumns;
}

bool knows_share(const WorkDone& work) { return work.total > 0 && work.done > 0; }

/// "50 %, 17 s left", or how long it has taken so far.
std::string state_text(const WorkDone& work) {
  if (!knows_share(work)) return duration_text(work.elapsed_s);
  const std::int64_t done = std::min(work.done, work.total);
  const double share = static_cast<double>(done) / static_cast<double>(work.total);
  return cat(static_cast<int>(100 * share), " %, ",
             duration_text(work.elapsed_s * (1 - share) / share), " left");
}

std::string bar_text(const WorkDone& work, std::size_t cells) {
  const double share =
      std::min(1.0, static_cast<double>(work.done) / static_cast<double>(work.total));
  const auto filled = static_cast<std::size_t>(static_cast<double>(cells) * share);
  return cat('[', std::string(filled, '#'), std::string(cells - filled, '.'), ']');
}

/// A label and a state on a line. If they do not fit together, the label is cut.
std::string joined(std::string_view label, std::string_view between, std::string_view state,
                   std::size_t columns) {
  const std::size_t others = between.size() + state.size();
  if (others >= columns) return cut_to_columns(state, columns);
  return cat(cut_to_columns(label, columns - others), between, state);
}

}  // namespace

std::string duration_text(double seconds) {
  const auto all = static_cast<std::int64_t>(std::min(seconds, 1e9));
  if (all < 60) return cat(all, " s");
  const auto two_digits = [](std::int64_t n) { return cat(n < 10 ? "0" : "", n); };
  const std::int64_t minutes = all / 60;
  if (minutes < 60) return cat(minutes, ':', two_digits(all % 60));
  return cat(minutes / 60, ':', two_digits(minutes % 60), ':', two_digits(all % 60));
}

std::string progress_bar(std::string_view label, const WorkDone& work, std::size_t columns) {
  constexpr std::size_t kAroundCells = 3;  // brackets and a space
  const std::string state = state_text(work);
  const std::size_t without_bar = columns_of(label) + 1 + state.size();
  const std::size_t left = columns > without_bar ? columns - without_bar : 0;
  if (!knows_share(work) || left < kAroundCells + kFewestCells) {
    return joined(label, " ", state, columns);
  }
  return cat(label, ' ', bar_text(work, std::min(kMostCells, left - kAroundCells)), ' ', state);
}

std::string progress_sentence(std::string_view label, const WorkDone& work, std::size_t columns) {
  return joined(label, ": ", state_text(work), columns);
}

Progress::Progress(std::string label, std::int64_t total)
    : on_terminal_(isatty(STDERR_FILENO) != 0), total_(total), label_(std::move(label)) {
  try {
    painter_ = std::jthread([this](const std::stop_token& stop) { show_until_stopped(stop); });
  } catch (const std::system_error&) {  // the work can do without
  }
}

Progress::~Progress() {
  if (!painter_.joinable()) return;
  painter_.request_stop();
  painter_.join();
  erase();
}

void Progress::advance(std::int64_t steps) {
  const std::scoped_lock lock(mutex_);
  done_ += steps;
}

void Progress::set_done(std::int64_t done) {
  const std::scoped_lock lock(mutex_);
  done_ = done;
}

void Progress::set_label(std::string label) {
  const std::scoped_lock lock(mutex_);
  label_ = std::move(label);
}

Progress::Pause::Pause(Progress& progress) : lock_(progress.mutex_) { progress.erase(); }

void Progress::show_until_stopped(const std::stop_token& stop) {
  const Pace pace = on_terminal_ ? kOnTerminal : kElsewhere;
  std::unique_lock lock(mutex_);
  const auto never = [] { return false; };
  for (auto next = start_ + pace.first;; next += pace.interval) {
    stopped_.wait_until(lock, stop, next, never);
    if (stop.stop_requested()) return;
    try {
      show();
    } catch (const std::bad_alloc&) {  // the work may still have memory enough
    }
  }
}

void Progress::show() {
  const std::chrono::duration<double> elapsed = Clock::now() - start_;
  const WorkDone work{done_, total_, elapsed.count()};
  if (on_terminal_) {
    // One column stays free: some terminals wrap when the last is written.
    const std::size_t columns = std::max<std::size_t>(terminal_columns(), 2) - 1;
    std::fputs((kEraseLine + progress_bar(label_, work, columns)).c_str(), stderr);
    std::fflush(stderr);
    drawn_ = true;
  } else {
    std::fputs(cat("# ", progress_sentence(label_, work, kLineColumns), '\n').c_str(), stderr);
  }
}

void Progress::erase() {
  if (!std::exchange(drawn_, false)) return;
  std::fputs(kEraseLine, stderr);
  std::fflush(stderr);
}

}  // namespace uniep::tool
