#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "layout/page_pool.h"

namespace uniep {

class PagePool;

/// The pages of one plan on the host. They go back once: behind the backward pass that reads them
/// last, else with the end of what forward saved, of the plan, or of this.
class PageLease {
 public:
  /// Of so many pages, which `pool` is about to fill in.
  PageLease(std::shared_ptr<PagePool> pool, std::int64_t pages)
      : pool_(std::move(pool)), table_(static_cast<std::size_t>(pages), kNoPage) {}
  PageLease(const PageLease&) = delete;
  PageLease& operator=(const PageLease&) = delete;
  ~PageLease() { give_back(); }

  const PagePool& pool() const { return *pool_; }
  const std::int32_t* table() const { return table_.data(); }
  std::int64_t pages() const { return static_cast<std::int64_t>(table_.size()); }

  bool is_held() const { return held_; }
  void give_back();

  /// Two forward passes would write the same pages.
  bool had_forward() const { return had_forward_; }
  void begin_forward() { had_forward_ = true; }

 private:
  friend class PagePool;

  const std::shared_ptr<PagePool> pool_;
  std::vector<std::int32_t> table_;
  std::atomic<bool> held_ = false;
  std::atomic<bool> had_forward_ = false;
};

/// The free pages of a rank's row pool, where they are the host's business. Plans take pages one
/// after another, leases end at any time, on any thread.
class PagePool : public std::enable_shared_from_this<PagePool> {
 public:
  /// `memory` owns what `stack` points to.
  PagePool(PageStack stack, std::int64_t pages, std::shared_ptr<void> memory);

  /// A plan that is about to take pages. Until it ends there are no fewer free than it has said, so
  /// what ranks have agreed on by then cannot fail.
  class Planning {
   public:
    /// Throws Error(kInvalidArgument) while another one lives.
    explicit Planning(PagePool& pool);
    Planning(const Planning&) = delete;
    Planning& operator=(const Planning&) = delete;
    ~Planning() { pool_.planning_ = false; }

    const PageCount& count() const { return count_; }
    /// Of `count` pages, at most those that were free.
    std::shared_ptr<PageLease> take(std::int64_t count);

   private:
    PagePool& pool_;
    PageCount count_;
  };

  PageCount count() const;
  std::int64_t fewest_free() const;

 private:
  friend class PageLease;
  void take(PageLease& lease);
  void give_back(const std::vector<std::int32_t>& table);

  const PageStack stack_;
  const std::int64_t pages_;
  const std::shared_ptr<void> memory_;
  mutable std::mutex mutex_;  // of the stack
  std::atomic<bool> planning_ = false;
};

}  // namespace uniep
