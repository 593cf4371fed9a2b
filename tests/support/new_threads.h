#pragma once

#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <thread>

namespace uniep::testing {

/// The threads of this process that were started while it lives. Linux wakes who joins a thread
/// before it takes the thread off /proc, milliseconds later under load; so a count is awaited, and
/// threads of earlier tests that are still listed do not count.
class NewThreads {
 public:
  NewThreads() : old_(listed()) {}

  /// How many there are, once they are `wanted`; after ten seconds, however many there are.
  int settled_at(int wanted) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    int count = now();
    while (count != wanted && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      count = now();
    }
    return count;
  }

 private:
  using Ids = std::set<std::string>;

  static Ids listed() {
    Ids ids;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      ids.insert(task.path().filename());
    }
    return ids;
  }

  int now() const {
    int count = 0;
    for (const std::string& id : listed()) count += old_.contains(id) ? 0 : 1;
    return count;
  }

  Ids old_;
};

}  // namespace uniep::testing
