#pragma once

#include <memory>
#include <span>
#include <vector>

#include "group/heap.h"
#include "layer/row_pool_data.h"
#include "plan/page_pool.h"

namespace uniep::cpu {

/// A row pool of a CPU rank.
class CpuRowPool final : public RowPoolData {
 public:
  CpuRowPool(const Problem& p, std::int64_t num_pages, const Heap& memory)
      : RowPoolData(Backend::kCpu, p, num_pages, memory.data()),
        memory_(memory),
        free_(stack(), num_pages) {}

  PagePool& free() { return free_; }
  std::int64_t free_pages() const override { return free_.count().free; }
  std::int64_t fewest_free_pages() const override { return free_.fewest_free(); }

 private:
  const Heap memory_;
  PagePool free_;
};

/// The pages of a plan, which keeps the pool.
class CpuLease final : public PageLease {
 public:
  CpuLease(std::shared_ptr<CpuRowPool> pool, PagePool::Planning& planning, std::int64_t count)
      : PageLease(pool.get()),
        pool_(std::move(pool)),
        table_(static_cast<std::size_t>(count), kNoPage) {
    planning.take(table_);
    held_ = true;
  }
  ~CpuLease() override { give_back(); }

  /// By row / row_align.
  const std::int32_t* table() const { return table_.data(); }
  std::int64_t pages() const { return static_cast<std::int64_t>(table_.size()); }

 private:
  void return_pages() override { pool_->free().give_back(table_); }

  const std::shared_ptr<CpuRowPool> pool_;
  std::vector<std::int32_t> table_;
};

/// A pool of at most so many bytes, in the caller's memory if there is any.
std::shared_ptr<RowPoolData> make_row_pool(const Problem& problem, std::int64_t bytes,
                                           std::span<std::byte> memory);

}  // namespace uniep::cpu
