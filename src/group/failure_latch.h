#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/rank_limits.h"
#include "uniep/error.h"

namespace uniep {

/// The memory of a FailureLatch, which processes may share: plain bytes, without locks, and whole
/// whenever a process is killed. Nobody reads a record before `first` names it, and its writer has
/// completed it by then.
struct FailureBoard {
  struct Record {
    std::int32_t rank = -1;  // that failed
    std::uint32_t length = 0;
    char sentence[1016] = {};
  };
  static_assert(std::atomic<std::int32_t>::is_always_lock_free);

  std::atomic<std::int32_t> first{-1};  // whose record counts
  Record records[kMaxGroupRanks];       // by the rank that writes it
};

/// The group's first failure. Every wait looks at it, so that one rank's error ends all ranks'
/// passes instead of leaving them to wait for it.
class FailureLatch {
 public:
  FailureLatch() : own_(std::make_unique<FailureBoard>()), board_(*own_) {}
  /// On a board that lives longer. A process may have one latch on a board.
  explicit FailureLatch(FailureBoard& board) : board_(board) {}

  /// Rank `by` says that `rank` has failed. Keeps the first call's failure; later ones are ignored.
  void raise(int by, int rank, const std::string& sentence) {
    const std::scoped_lock lock(mutex_);  // a rank has several threads, and one record
    if (raised()) return;
    FailureBoard::Record& record = board_.records[by];
    record.rank = rank;
    record.length = static_cast<std::uint32_t>(std::min(sentence.size(), sizeof(record.sentence)));
    std::memcpy(record.sentence, sentence.data(), record.length);
    std::int32_t nobody = -1;
    board_.first.compare_exchange_strong(nobody, by, std::memory_order_release,
                                         std::memory_order_relaxed);
  }
  /// Rank `rank` says that it has failed itself.
  void raise(int rank, const std::string& sentence) { raise(rank, rank, sentence); }

  bool raised() const { return board_.first.load(std::memory_order_acquire) >= 0; }

  /// What was raised.
  struct Failure {
    int rank = 0;
    std::string sentence{};
  };
  std::optional<Failure> failure() const {
    const int first = board_.first.load(std::memory_order_acquire);
    if (first < 0) [[likely]]
      return std::nullopt;
    const FailureBoard::Record& record = board_.records[first];
    return Failure{record.rank, std::string(record.sentence, record.length)};
  }

  /// Throws Error(kPeerFailed) where a failure was raised.
  void check() const {
    if (const auto found = failure()) [[unlikely]] {
      throw Error(ErrorCode::kPeerFailed, "the group is unusable since rank " +
                                              std::to_string(found->rank) +
                                              " failed: " + found->sentence);
    }
  }

 private:
  std::unique_ptr<FailureBoard> own_;
  FailureBoard& board_;
  std::mutex mutex_;
};

}  // namespace uniep
