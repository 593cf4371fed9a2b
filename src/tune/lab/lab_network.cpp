#include "tune/lab/lab_network.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/env.h"
#include "rail/rail.h"

namespace uniep::tune {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLimitMs = 30000;
constexpr int kRepeats = 9;
constexpr double kLongSeconds = 0.5;  // after which a slow network is not measured again
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::int64_t kBlockBytes = 64 << 10;  // as a task of a layer sends
constexpr int kFewBlocks = 2, kManyBlocks = 10;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Seconds of cores that all threads but this one have taken.
double seconds_of_others() {
  const auto seconds = [](clockid_t clock) {
    timespec time{};
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  return seconds(CLOCK_PROCESS_CPUTIME_ID) - seconds(CLOCK_THREAD_CPUTIME_ID);
}

/// Two ranks on two hosts; the first sends, and the second counts.
class Wire {
 public:
  explicit Wire(double gigabytes_per_second)
      : memory_(static_cast<std::size_t>(kCounterAt) + sizeof(std::uint32_t)) {
    std::vector<std::string> addresses;
    for (int rank = 0; rank < 2; ++rank) {
      rails_.push_back(make_rail({.rank = rank,
                                  .layout = {.hosts = 2, .local_ranks = 1},
                                  .gigabytes_per_second = gigabytes_per_second}));
      addresses.push_back(rails_.back()->address());
    }
    rails_[1]->attach(kMemory, {.ranks = {memory_}, .owner = nullptr});
    auto first =
        std::async(std::launch::async, [&] { rails_[0]->connect(addresses, {}, kLimitMs); });
    rails_[1]->connect(addresses, {}, kLimitMs);
    first.get();
  }
  ~Wire() {
    rails_[1]->detach(kMemory);
    rails_.clear();
  }

  /// Seconds until so many blocks have come.
  double send(int blocks, std::int64_t bytes) {
    const std::uint32_t before = count();
    const RailBlock block{
        .segments = {{0, std::span(sent_).first(static_cast<std::size_t>(bytes))}},
        .signals = {{.counter = kCounterAt, .local = 0, .amount = 1}}};
    const auto begin = Clock::now();
    for (int i = 0; i < blocks; ++i) rails_[0]->put(1, kMemory, block);
    while (count() - before < static_cast<std::uint32_t>(blocks)) {
      require(seconds_since(begin) < 1e-3 * kLimitMs, ErrorCode::kTimeout, blocks, " blocks of ",
              bytes, " bytes did not cross the network in ", kLimitMs,
              " ms; a larger UNIEP_CPU_NETWORK_GBPS is accepted");
      std::this_thread::yield();
    }
    return seconds_since(begin);
  }

  /// Seconds of a core that a block takes at each end, where others come with it.
  double work_of(std::int64_t bytes) {
    double least = kNever;
    for (int i = 0; i < kRepeats; ++i) {
      const double before = seconds_of_others();
      send(kManyBlocks, bytes);
      least = std::min(least, seconds_of_others() - before);
    }
    return least / (2 * kManyBlocks);
  }

 private:
  static constexpr std::uint64_t kMemory = 1;
  static constexpr std::int64_t kCounterAt = kBlockBytes;

  std::uint32_t count() {
    auto* counter = reinterpret_cast<std::uint32_t*>(memory_.data() + kCounterAt);
    return std::atomic_ref(*counter).load(std::memory_order_acquire);
  }

  std::vector<std::byte> sent_ = std::vector<std::byte>(static_cast<std::size_t>(kBlockBytes));
  std::vector<std::byte> memory_;
  std::vector<std::unique_ptr<Rail>> rails_;
};

}  // namespace

Topology measure_network(int ranks_per_host) {
  Wire wire(env_network_gbps());
  // The least of each, since what else the machine does makes it longer only.
  double small = kNever, few = kNever, many = kNever;
  const auto begin = Clock::now();
  for (int i = 0; i < kRepeats && (i == 0 || seconds_since(begin) < kLongSeconds); ++i) {
    small = std::min(small, wire.send(1, 4));
    few = std::min(few, wire.send(kFewBlocks, kBlockBytes));
    many = std::min(many, wire.send(kManyBlocks, kBlockBytes));
  }
  const double more = static_cast<double>(kManyBlocks - kFewBlocks) * kBlockBytes;
  Wire at_full_speed(0);
  const double work = at_full_speed.work_of(4);
  const double work_of_block = at_full_speed.work_of(kBlockBytes);
  return {.ranks_per_node = ranks_per_host,
          .nic_bytes_per_s = more / std::max(1e-9, many - few),
          .nic_latency_s = small,
          .message_s = work,
          .message_byte_s = std::max(0.0, work_of_block - work) / kBlockBytes};
}

}  // namespace uniep::tune
