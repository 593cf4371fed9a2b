#include "cpu/worker_pool.h"

#include <algorithm>

#include "base/threads.h"

namespace uniep::cpu {

WorkerPool::~WorkerPool() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void WorkerPool::run(int count, const std::function<void(int)>& body) {
  {
    const std::scoped_lock lock(mutex_);
    // First, since it may throw, and then nobody may have begun. Room ahead of threads: one that
    // has begun and finds none would end the process.
    threads_.reserve(static_cast<std::size_t>(std::max(count - 1, 0)));
    while (static_cast<int>(threads_.size()) < count - 1) {
      threads_.push_back(
          start_thread([this, i = static_cast<int>(threads_.size()) + 1] { serve(i); }));
    }
    body_ = &body;
    count_ = count;
    running_ = count - 1;
    ++round_;
  }
  work_.notify_all();
  body(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return running_ == 0; });
}

void WorkerPool::serve(int index) {
  std::uint64_t served = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stopping_ || (round_ != served && index < count_); });
    if (stopping_) return;
    served = round_;
    const std::function<void(int)>& body = *body_;
    lock.unlock();
    body(index);
    lock.lock();
    if (--running_ == 0) done_.notify_one();
  }
}

}  // namespace uniep::cpu
