#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "uniep/rank_layout.h"

// What crosses between hosts: blocks of bytes between ranks of the same local number, a rail. A
// rank puts a block into the memory of its rail's rank on another host, and counters there say
// when it has come. Neither side's host code has to meet the other in the step: who sends names the
// places, who receives waits for counters as for those of any peer.

namespace uniep {

/// A block that is put: bytes for places in the receiver's memory, then additions to counters of
/// the ranks of its host. Whoever sees a counter raised (acquire) sees all bytes of the block.
struct RailBlock {
  struct Segment {
    std::int64_t to = 0;  ///< offset in the memory of the receiving rank
    std::span<const std::byte> bytes{};
  };
  struct Signal {
    std::int64_t counter = 0;  ///< offset of a std::uint32_t in the memory of ...
    std::int32_t local = 0;    ///< ... this rank of the receiving host, by local number
    std::uint32_t amount = 0;
  };

  std::vector<Segment> segments{};
  std::vector<Signal> signals{};

  void clear() {
    segments.clear();
    signals.clear();
  }
};

/// Memory that blocks are put into.
struct RailMemory {
  std::vector<std::span<std::byte>> ranks{};  ///< of this host, by local number
  std::shared_ptr<const void> owner{};        ///< keeps it
};

/// That a rank has failed, in a sentence.
struct RailFailure {
  int rank = 0;
  std::string sentence{};
};

/// How a rail hears of failures of its group, and tells those that it finds. Called from a thread
/// of the rail, and `failure` also from the one that connects it.
struct RailWatch {
  /// The failure that this rank knows of, its own or another's: then all other hosts hear of it.
  std::function<std::optional<RailFailure>()> failure{};
  /// A failure that another host has told, or the rail's own.
  std::function<void(const RailFailure&)> failed{};
  /// Rank `rank` of another host has gone: in good order, or it was lost. Whoever waits for it will
  /// ask.
  std::function<void(int rank, bool lost)> ended{};
  /// Throws where ranks that are waited for will not connect any more. Called, several times a
  /// second, by the thread that connects.
  std::function<void()> check{};
};

/// One rank's connections to the ranks of its rail. Blocks of two puts may arrive in any order. All
/// calls may come from any thread.
class Rail {
 public:
  virtual ~Rail() = default;

  /// Where the others find this rank.
  virtual std::string address() const = 0;

  /// Collective: `addresses` of all ranks of the group, by rank. Throws Error(kTimeout) where one
  /// of the rail has not come after `limit_ms`, and before that where the group has failed.
  virtual void connect(const std::vector<std::string>& addresses, RailWatch watch,
                       int limit_ms) = 0;

  /// Lets blocks come into this memory, from before the first that can be sent. `number` is the
  /// same on all ranks.
  virtual void attach(std::uint64_t number, RailMemory memory) = 0;
  /// Blocks that still come are dropped.
  virtual void detach(std::uint64_t number) = 0;

  /// Sends a block to memory `number` of the rail's rank on `host`. Returns at once; the bytes have
  /// been copied.
  virtual void put(int host, std::uint64_t number, const RailBlock& block) = 0;
};

/// What a rail is made with.
struct RailOptions {
  int rank = 0;
  RankLayout layout{};
  std::string address = "127.0.0.1";  ///< of this host, at which it listens
  std::uint64_t group = 0;            ///< the group's number: others are turned away
  double gigabytes_per_second = 0;    ///< emulated speed of the rank's port; 0: as fast as it goes
};

/// Throws Error(kUnsupported) where it has none.
std::unique_ptr<Rail> make_rail(const RailOptions& options);

}  // namespace uniep
