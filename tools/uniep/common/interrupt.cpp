#include "common/interrupt.h"

#include <signal.h>
#include <time.h>

#include <array>
#include <atomic>

namespace uniep::tool {
namespace {

std::atomic<long> first_second{-1};  // monotonic time of the first signal; -1: none has come
std::atomic<int> first_signal{SIGINT};
static_assert(std::atomic<long>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

/// Ctrl-C on a terminal reaches every process of a group, and a launcher hands it on: the same one
/// twice.
void note(int signal) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  long none = -1;
  if (first_second.compare_exchange_strong(none, now.tv_sec)) {
    first_signal = signal;
    return;
  }
  if (now.tv_sec - none < 2) return;
  ::signal(signal, SIG_DFL);
  raise(signal);
}

constexpr std::array kSignals = {SIGINT, SIGTERM};

/// What was to happen before, by kSignals.
std::array<struct sigaction, kSignals.size()> before;

}  // namespace

Interrupt::Interrupt() {
  first_second = -1;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before[i]);
    // Shells have it so for what they start in the background, and nohup does.
    if (before[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

Interrupt::~Interrupt() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before[i], nullptr);
  first_second = -1;
}

bool Interrupt::requested() { return first_second != -1; }

int Interrupt::exit_code() { return 128 + first_signal; }

}  // namespace uniep::tool
