#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "layout/page_pool.h"
#include "plan/page_lease.h"

namespace uniep {

/// The free pages of a pool whose plans are made by the host. Plans take pages one after another,
/// leases end at any time, on any thread.
class PagePool {
 public:
  /// The stack outlives this.
  PagePool(PageStack stack, std::int64_t pages);

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

    /// Takes `table.size()` pages, at most those that were free.
    void take(std::vector<std::int32_t>& table) { pool_.take(table); }

   private:
    PagePool& pool_;
    PageCount count_{};
  };

  PageCount count() const;
  std::int64_t fewest_free() const;
  void give_back(const std::vector<std::int32_t>& table);

 private:
  void take(std::vector<std::int32_t>& table);

  const PageStack stack_;
  const std::int64_t pages_;
  mutable std::mutex mutex_;  // of the stack
  std::atomic<bool> planning_ = false;
};

}  // namespace uniep
