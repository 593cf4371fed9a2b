#include "plan/page_pool.h"

#include "base/check.h"

namespace uniep {

PagePool::PagePool(PageStack stack, std::int64_t pages) : stack_(stack), pages_(pages) {
  fill_page_stack(stack, pages);
}

PagePool::Planning::Planning(PagePool& pool) : pool_(pool) {
  require(!pool.planning_.exchange(true), ErrorCode::kInvalidArgument,
          "another thread is in Layer::plan of a layer with the same row pool; one at a time is "
          "accepted");
  count_ = pool.count();
}

PageCount PagePool::count() const {
  const std::scoped_lock lock(mutex_);
  return {pages_, stack_.free[0]};
}

std::int64_t PagePool::fewest_free() const {
  const std::scoped_lock lock(mutex_);
  return stack_.free[1];
}

void PagePool::take(std::vector<std::int32_t>& table) {
  const auto count = static_cast<std::int64_t>(table.size());
  const std::scoped_lock lock(mutex_);
  const std::int32_t free = stack_.free[0];
  ensure(count <= free, "a plan takes ", count, " pages of ", free);
  for (std::int64_t group = 0; group < count; ++group) {
    table[static_cast<std::size_t>(group)] = stack_.taken(free, group);
  }
  stack_.free[0] = free - static_cast<std::int32_t>(count);
  stack_.free[1] = min_of(stack_.free[1], stack_.free[0]);
}

void PagePool::give_back(const std::vector<std::int32_t>& table) {
  const auto count = static_cast<std::int64_t>(table.size());
  const std::scoped_lock lock(mutex_);
  const std::int32_t free = stack_.free[0];
  for (std::int64_t group = 0; group < count; ++group) {
    stack_.given_back(free, group) = table[static_cast<std::size_t>(group)];
  }
  stack_.free[0] = free + static_cast<std::int32_t>(count);
}

}  // namespace uniep
