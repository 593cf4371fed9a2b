#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "rail/rail.h"

namespace uniep::testing {

/// One rank's rail, with memory that blocks come into and a counter at its end, aligned.
class RailRank {
 public:
  static constexpr std::uint64_t kMemory = 7;

  RailRank(const RailOptions& options, std::int64_t bytes)
      : memory_(std::make_shared<std::vector<std::byte>>(
            static_cast<std::size_t>((bytes + 3) / 4 * 4) + 4)),
        rail_(make_rail(options)) {
    const std::span<std::byte> all(*memory_);
    RailMemory memory{.owner = memory_};
    memory.ranks.assign(static_cast<std::size_t>(options.layout.local_ranks), all);
    rail_->attach(kMemory, memory);
    local_ = options.layout.local_of(options.rank);
  }

  Rail& rail() { return *rail_; }
  void leave() { rail_.reset(); }
  const std::vector<std::byte>& memory() const { return *memory_; }
  std::int64_t counter_at() const { return static_cast<std::int64_t>(memory_->size()) - 4; }

  RailWatch watch() {
    return {.failure =
                [this] {
                  std::this_thread::sleep_for(late_.exchange({}));
                  const std::scoped_lock lock(mutex_);
                  return failure_;
                },
            .failed = [this](const RailFailure& f) { note("failed", f.rank, ": " + f.sentence); },
            .ended = [this](int rank, bool lost) { note(lost ? "lost" : "left", rank, ""); }};
  }
  void fail(const RailFailure& failure) {
    const std::scoped_lock lock(mutex_);
    failure_ = failure;
  }
  /// The rail's thread does nothing for so long.
  void be_late(std::chrono::milliseconds time) { late_ = time; }
  /// Whether it has begun to.
  bool is_late() const { return late_.load() == std::chrono::milliseconds{}; }
  std::string heard() {
    const std::scoped_lock lock(mutex_);
    return heard_;
  }

  std::uint32_t count() const {
    auto* counter = reinterpret_cast<std::uint32_t*>(memory_->data() + counter_at());
    return std::atomic_ref(*counter).load(std::memory_order_acquire);
  }
  /// Until so many blocks have come, or something was heard; whether they have.
  bool wait_for(std::uint32_t blocks, int limit_ms = 30000) {
    return wait([&] { return count() >= blocks; }, limit_ms);
  }
  template <class Done>
  bool wait(Done&& done, int limit_ms = 30000) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
    while (!done()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
  }

  /// Puts bytes at `to` of the rail's rank on `host`, and raises its counter by one.
  void put(int host, std::int64_t to, std::span<const std::byte> bytes) {
    const RailBlock block{.segments = {{to, bytes}}, .signals = {{counter_at(), local_, 1}}};
    rail_->put(host, kMemory, block);
  }

 private:
  void note(const char* what, int rank, const std::string& sentence) {
    const std::scoped_lock lock(mutex_);
    heard_ += std::string(what) + " " + std::to_string(rank) + sentence + "\n";
  }

  std::atomic<std::chrono::milliseconds> late_{};
  std::mutex mutex_;
  std::optional<RailFailure> failure_;
  std::string heard_;
  std::shared_ptr<std::vector<std::byte>> memory_;
  int local_ = 0;
  std::unique_ptr<Rail> rail_;
};

/// The rails of all ranks, in this process, connected.
class Rails {
 public:
  Rails(RankLayout layout, std::int64_t bytes, double gigabytes_per_second = 0) {
    std::vector<std::string> addresses;
    for (int r = 0; r < layout.ranks(); ++r) {
      const RailOptions options{
          .rank = r, .layout = layout, .group = 11, .gigabytes_per_second = gigabytes_per_second};
      ranks_.push_back(std::make_unique<RailRank>(options, bytes));
      addresses.push_back(ranks_.back()->rail().address());
    }
    std::vector<std::jthread> threads;
    for (auto& rank : ranks_) {
      threads.emplace_back(
          [&addresses, &rank] { rank->rail().connect(addresses, rank->watch(), 30000); });
    }
  }
  RailRank& operator[](int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<std::unique_ptr<RailRank>> ranks_;
};

}  // namespace uniep::testing
