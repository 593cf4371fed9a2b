#pragma once

#include <atomic>

namespace uniep {

/// The pages of one plan, as the host knows them. They go back once: behind the backward pass that
/// reads them last, else with the end of what forward saved, or of the plan.
class PageLease {
 public:
  /// `pool`: RowPoolData whose pages they are.
  explicit PageLease(const void* pool) : pool_(pool) {}
  virtual ~PageLease() = default;
  PageLease(const PageLease&) = delete;
  PageLease& operator=(const PageLease&) = delete;

  bool is_of(const void* pool) const { return pool == pool_; }
  bool is_held() const { return held_; }

  /// At the end of what has them; on any thread.
  void give_back() {
    if (held_.exchange(false)) return_pages();
  }

  /// A plan serves one forward pass: two would write the same pages.
  bool had_forward() const { return had_forward_; }
  void begin_forward() { had_forward_ = true; }

 protected:
  virtual void return_pages() = 0;

  std::atomic<bool> held_ = false;

 private:
  const void* const pool_;
  std::atomic<bool> had_forward_ = false;
};

}  // namespace uniep
