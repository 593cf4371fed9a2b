#include "comm/cpu_group.h"

#include <sys/mman.h>

#include <chrono>

#include "base/check.h"
#include "base/env.h"
#include "comm/wait_error.h"

namespace uniep {

Heap::Heap(std::int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(p != MAP_FAILED, ErrorCode::kCapacity, "cannot allocate ", bytes,
          " bytes of workspace; a smaller max_tokens or capacity_rows needs less");
  data_ = static_cast<std::byte*>(p);
}

Heap::~Heap() {
  if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(bytes_));
}

CpuGroup::CpuGroup(int size)
    : size_(size),
      link_(size, env_link_gbps().value_or(0), env_link_latency_us()),
      next_round_(static_cast<std::size_t>(size)),
      next_heap_(static_cast<std::size_t>(size)) {
  if (link_.enabled()) courier_.emplace();
}

std::vector<std::string> CpuGroup::all_gather(int rank, const std::string& bytes, const char* stage,
                                              int limit_ms) {
  failure_.check();
  std::unique_lock lock(mutex_);
  const std::uint64_t number = next_round_[static_cast<std::size_t>(rank)]++;
  Round& round = rounds_[number];
  round.parts.resize(static_cast<std::size_t>(size_));
  round.parts[static_cast<std::size_t>(rank)] = bytes;
  if (++round.present == size_) arrived_.notify_all();

  const auto limit = Clock::now() + std::chrono::milliseconds(limit_ms);
  while (round.present < size_ && !failure_.raised() && Clock::now() < limit) {
    // Short naps rather than one long wait: a failure raised elsewhere does not notify us.
    arrived_.wait_for(lock, std::chrono::milliseconds(5));
  }
  if (round.present < size_) {
    failure_.check();
    int missing = 0;
    while (round.parts[static_cast<std::size_t>(missing)]) ++missing;
    const Error error = wait_error({.rank = rank,
                                    .stage = stage,
                                    .tile = -1,
                                    .peer = missing,
                                    .expected = static_cast<std::uint64_t>(size_),
                                    .seen = static_cast<std::uint64_t>(round.present),
                                    .limit_ms = limit_ms},
                                   "ranks present");
    failure_.raise(rank, error.what());
    throw error;
  }
  std::vector<std::string> all;
  for (const auto& part : round.parts) all.push_back(*part);
  if (++round.left == size_) rounds_.erase(number);
  return all;
}

std::vector<std::shared_ptr<Heap>> CpuGroup::share(int rank, const std::shared_ptr<Heap>& own,
                                                   int limit_ms) {
  std::uint64_t number = 0;
  {
    const std::scoped_lock lock(mutex_);
    number = next_heap_[static_cast<std::size_t>(rank)]++;
    auto& heaps = heaps_[number];
    heaps.resize(static_cast<std::size_t>(size_));
    heaps[static_cast<std::size_t>(rank)] = own;
  }
  all_gather(rank, "", "plan", limit_ms);
  std::vector<std::shared_ptr<Heap>> all;
  {
    const std::scoped_lock lock(mutex_);
    for (const auto& heap : heaps_[number]) all.push_back(heap.lock());
  }
  all_gather(rank, "", "plan", limit_ms);  // nobody drops its heap before all hold it
  const std::scoped_lock lock(mutex_);
  heaps_.erase(number);
  return all;
}

}  // namespace uniep
