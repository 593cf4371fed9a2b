#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace uniep::cpu {

/// Threads that persist between passes.
class WorkerPool {
 public:
  WorkerPool() = default;
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  /// Runs body(0) .. body(count - 1) at the same time, body(0) on the calling thread, and returns
  /// when all are done. `body` must not throw.
  void run(int count, const std::function<void(int)>& body);

 private:
  void serve(int index);

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  const std::function<void(int)>* body_ = nullptr;
  int count_ = 0;
  int running_ = 0;
  std::uint64_t round_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;  // thread i is worker i + 1
};

}  // namespace uniep::cpu
