#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "group/failure_latch.h"
#include "group/tcp_connection.h"
#include "group/tcp_meeting.h"
#include "uniep/error.h"

namespace uniep::tcp {

/// A collective step: what errors call it, and how long it waits for other ranks.
struct Step {
  const char* stage;
  int limit_ms;
  std::uint64_t round = 0;  ///< its number among all_gathers; 0: joining
  Deadline deadline = Deadline::in(std::chrono::milliseconds(limit_ms));

  /// A deadline as long as the step's, from now on: for bytes that keep moving.
  Deadline renewed() const { return Deadline::in(std::chrono::milliseconds(limit_ms)); }
};

/// Who is here, by rank.
struct RollCall {
  std::vector<bool> here;

  int present() const;
  int first_missing() const;  ///< the number of ranks where nobody is missing
  bool complete() const { return first_missing() == static_cast<int>(here.size()); }
};

/// The ranks that this one has connections to, on rank 0 all others, elsewhere rank 0; and how the
/// failure of one becomes everybody's.
class Peers {
 public:
  Peers(int rank, int size, TcpWatch watch);

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// The connection to another rank: on rank 0 any, elsewhere rank 0; not open before that has
  /// joined.
  Connection& to(int rank) { return connections_[static_cast<std::size_t>(rank)]; }
  /// All that are open.
  std::vector<Connection*> connections();

  void watch(TcpWatch watch) { watch_ = std::move(watch); }
  FailureLatch& failure() { return failure_; }

  /// `tcp::pump`, but returns early so that the watch is asked in time.
  bool pump(const std::vector<Connection*>& connections, Deadline until, int also = -1);

  /// Sends a frame to all, as far as they can be reached.
  void tell(FrameKind kind, const std::string& payload);

  /// Why a rank will not come any more, as the watch knows now.
  std::optional<std::string> end_of(int rank) const;
  /// Whether a rank has ended and all that it sent was read.
  bool is_gone(int rank);
  /// Throws where a connected rank has failed or gone, without saying goodbye; never waits.
  void check();

  // Each of these throws, and has told the others why as far as they can be reached.
  [[noreturn]] void fail(const Error& error, int failed_rank);
  /// The time limit of `step` has passed.
  [[noreturn]] void give_up_on(int rank, const Step& step, int present);
  [[noreturn]] void give_up_on_missing(const Step& step, const RollCall& roll);
  /// `step`: in which it was missed; null: in none.
  [[noreturn]] void lost(int rank, const Step* step);
  /// `step`: what this rank waits for; null where it has not begun to wait.
  [[noreturn]] void hear_verdict(const std::string& payload, const Step* step);

 private:
  std::optional<std::string> await_end(int rank) const;
  Error missing_error(const Step& step, int peer, int present) const;

  const int rank_;
  const int size_;
  TcpWatch watch_;
  FailureLatch failure_;
  std::vector<Connection> connections_;  // by rank; on rank 0 the first is not used
};

}  // namespace uniep::tcp
