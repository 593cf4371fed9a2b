#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/cpu_info.h"

namespace uniep::tune {

/// Threads that predictions are spread over.
inline std::size_t model_threads() { return static_cast<std::size_t>(std::max(1, usable_cpus())); }

/// f(0) to f(count - 1), side by side on up to `most` threads, or on fewer where there can be no
/// more. What one of them throws is thrown when all have ended.
template <class F>
void for_each_in_parallel(std::size_t count, std::size_t most, F&& f) {
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr thrown;
  const auto work = [&] {
    try {
      for (std::size_t i = next++; i < count; i = next++) f(i);
    } catch (...) {
      next = count;  // the others need not go on
      const std::lock_guard lock(mutex);
      if (!thrown) thrown = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    try {
      for (std::size_t i = 1; i < std::min(count, most); ++i) threads.emplace_back(work);
    } catch (const std::system_error&) {
      // The threads that there are do the work of all.
    }
    work();
  }
  if (thrown) std::rethrow_exception(thrown);
}

/// Runs on up to `model_threads()` threads.
template <class F>
void for_each_in_parallel(std::size_t count, F&& f) {
  for_each_in_parallel(count, model_threads(), std::forward<F>(f));
}

}  // namespace uniep::tune
