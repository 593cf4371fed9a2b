#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "group/cpu_group.h"

namespace uniep {

/// Ranks that are threads of this process.
class ThreadGroup final : public CpuGroup {
 public:
  /// `hosts` > 1: they reach only one another's memory in as many equal runs of ranks.
  explicit ThreadGroup(int size, int hosts = 1);

  std::vector<std::string> all_gather(int rank, const std::string& bytes, const char* stage,
                                      int limit_ms) override;
  std::shared_ptr<Heap> allocate(int rank, std::int64_t bytes) override;
  std::vector<std::shared_ptr<Heap>> share(int rank, const std::shared_ptr<Heap>& own,
                                           int limit_ms) override;
  Rail& rail(int rank) override { return *rails_[static_cast<std::size_t>(rank)]; }
  /// A thread may always come back.
  std::optional<std::string> end_of(int) override { return std::nullopt; }

 private:
  /// One all_gather under way. A fast rank may begin the next before slow ones have left this one.
  struct Round {
    std::vector<std::optional<std::string>> parts;
    int present = 0;
    int left = 0;
  };

  void connect_rails();

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::uint64_t, Round> rounds_;
  std::vector<std::uint64_t> next_round_;  // by rank
  std::map<std::uint64_t, std::vector<std::weak_ptr<Heap>>> heaps_;
  std::vector<std::uint64_t> next_heap_;      // by rank
  std::vector<std::unique_ptr<Rail>> rails_;  // by rank, with several hosts; last: they end first
};

}  // namespace uniep
