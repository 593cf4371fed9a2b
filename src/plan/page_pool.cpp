#include "plan/page_pool.h"

#include <numeric>

#include "base/check.h"

namespace uniep {

void PageLease::give_back() {
  if (held_.exchange(false)) pool_->give_back(table_);
}

PagePool::PagePool(PageStack stack, std::int64_t pages, std::shared_ptr<void> memory)
    : stack_(stack), pages_(pages), memory_(std::move(memory)) {
  // Page 0 on top.
  std::iota(std::reverse_iterator(stack_.pages + pages), std::reverse_iterator(stack_.pages), 0);
  stack_.free[0] = stack_.free[1] = static_cast<std::int32_t>(pages);
}

PagePool::Planning::Planning(PagePool& pool) : pool_(pool) {
  require(!pool.planning_.exchange(true), ErrorCode::kInvalidArgument,
          "another thread is in Layer::plan of a layer with the same row pool; one at a time is "
          "accepted");
  count_ = pool.count();
}

std::shared_ptr<PageLease> PagePool::Planning::take(std::int64_t count) {
  auto lease = std::make_shared<PageLease>(pool_.shared_from_this(), count);
  pool_.take(*lease);
  return lease;
}

PageCount PagePool::count() const {
  const std::scoped_lock lock(mutex_);
  return {pages_, stack_.free[0]};
}

std::int64_t PagePool::fewest_free() const {
  const std::scoped_lock lock(mutex_);
  return stack_.free[1];
}

void PagePool::take(PageLease& lease) {
  const std::int64_t count = lease.pages();
  const std::scoped_lock lock(mutex_);
  const std::int32_t free = stack_.free[0];
  ensure(count <= free, "a plan takes ", count, " pages of ", free);
  for (std::int64_t group = 0; group < count; ++group) {
    lease.table_[static_cast<std::size_t>(group)] = stack_.taken(free, group);
  }
  stack_.free[0] = free - static_cast<std::int32_t>(count);
  stack_.free[1] = min_of(stack_.free[1], stack_.free[0]);
  lease.held_ = true;
}

void PagePool::give_back(const std::vector<std::int32_t>& table) {
  const std::scoped_lock lock(mutex_);
  const std::int32_t free = stack_.free[0];
  const auto count = static_cast<std::int64_t>(table.size());
  for (std::int64_t group = 0; group < count; ++group) {
    stack_.given_back(free, group) = table[static_cast<std::size_t>(group)];
  }
  stack_.free[0] = free + static_cast<std::int32_t>(count);
}

}  // namespace uniep
