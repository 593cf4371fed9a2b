#include "group/thread_group.h"

#include <chrono>
#include <future>

#include "base/deadline.h"
#include "base/env.h"
#include "base/random_number.h"
#include "base/wait_error.h"

namespace uniep {

ThreadGroup::ThreadGroup(int size, int hosts)
    : CpuGroup(layout_of_hosts(size, hosts), size, std::make_shared<GroupBoard>()),
      next_round_(static_cast<std::size_t>(size)),
      next_heap_(static_cast<std::size_t>(size)) {
  if (hosts > 1) connect_rails();
}

void ThreadGroup::connect_rails() {
  const std::uint64_t number = random_number();
  std::vector<std::string> addresses;
  for (int rank = 0; rank < size(); ++rank) {
    rails_.push_back(make_rail({.rank = rank,
                                .layout = layout(),
                                .group = number,
                                .gigabytes_per_second = env_network_gbps()}));
    addresses.push_back(rails_.back()->address());
  }
  // All of them share the latch already.
  const RailWatch watch{
      .failed = [this](const RailFailure& f) { failure().raise(f.rank, f.sentence); },
      .check = [this] { failure().check(); }};
  std::vector<std::future<void>> connected;
  for (const auto& rail : rails_) {
    connected.push_back(
        std::async(std::launch::async, [&] { rail->connect(addresses, watch, env_timeout_ms()); }));
  }
  for (auto& one : connected) one.get();
}

std::vector<std::string> ThreadGroup::all_gather(int rank, const std::string& bytes,
                                                 const char* stage, int limit_ms) {
  failure().check();
  std::unique_lock lock(mutex_);
  const std::uint64_t number = next_round_[static_cast<std::size_t>(rank)]++;
  Round& round = rounds_[number];
  round.parts.resize(static_cast<std::size_t>(size()));
  round.parts[static_cast<std::size_t>(rank)] = bytes;
  if (++round.present == size()) arrived_.notify_all();

  const Deadline limit = Deadline::in(std::chrono::milliseconds(limit_ms));
  while (round.present < size() && !failure().raised() && !limit.expired()) {
    // Short naps rather than one long wait: a failure raised elsewhere does not notify us.
    arrived_.wait_for(lock, std::chrono::milliseconds(5));
  }
  if (round.present < size()) {
    failure().check();
    int missing = 0;
    while (round.parts[static_cast<std::size_t>(missing)]) ++missing;
    const Error error = wait_error({.rank = rank,
                                    .stage = stage,
                                    .tile = -1,
                                    .peer = missing,
                                    .expected = static_cast<std::uint64_t>(size()),
                                    .seen = static_cast<std::uint64_t>(round.present),
                                    .limit_ms = limit_ms},
                                   "ranks present");
    failure().raise(rank, error.what());
    throw error;
  }
  std::vector<std::string> all;
  for (const auto& part : round.parts) all.push_back(*part);
  if (++round.left == size()) rounds_.erase(number);
  return all;
}

std::shared_ptr<Heap> ThreadGroup::allocate(int, std::int64_t bytes) {
  return std::make_shared<Heap>(bytes);
}

std::vector<std::shared_ptr<Heap>> ThreadGroup::share(int rank, const std::shared_ptr<Heap>& own,
                                                      int limit_ms) {
  std::uint64_t number = 0;
  {
    const std::scoped_lock lock(mutex_);
    number = next_heap_[static_cast<std::size_t>(rank)]++;
    auto& heaps = heaps_[number];
    heaps.resize(static_cast<std::size_t>(size()));
    heaps[static_cast<std::size_t>(rank)] = own;
  }
  all_gather(rank, "", "plan", limit_ms);
  std::vector<std::shared_ptr<Heap>> all;
  {
    const std::scoped_lock lock(mutex_);
    for (int r = 0; r < size(); ++r) {
      const bool is_here = layout().same_host(rank, r);
      all.push_back(is_here ? heaps_[number][static_cast<std::size_t>(r)].lock() : nullptr);
    }
  }
  all_gather(rank, "", "plan", limit_ms);  // nobody drops its heap before all hold it
  const std::scoped_lock lock(mutex_);
  heaps_.erase(number);
  return all;
}

}  // namespace uniep
