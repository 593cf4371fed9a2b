#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/descriptor.h"
#include "base/kept_from_children.h"

// Frames over a TCP connection that never blocks; tcp_bootstrap says what they mean. Both ends run
// the same build on machines of one kind: numbers travel as they lie in memory.

namespace uniep::tcp {

enum class FrameKind : std::uint32_t {
  kGreeting,  ///< root to whoever connects: who listens here
  kHello,     ///< member to root: who comes
  kRefused,   ///< root to member: the sentence why it cannot join
  kWelcome,   ///< root to member: all ranks are here
  kPart,      ///< member to root: its part of an all_gather
  kResult,    ///< root to member: all parts
  kExpired,   ///< member to root: my time limit has passed, who is missing?
  kWorking,   ///< root to member: nobody is missing, data is under way
  kVerdict,   ///< the group has failed, and why
  kBye,       ///< this rank is done and has nothing to report
};

struct Frame {
  FrameKind kind;
  std::string payload;
};

/// One end of a connection.
class Connection {
 public:
  /// Longest frame that is taken from somebody who has not been recognised yet.
  static constexpr std::uint64_t kStrangerLimit = 4096;

  Connection() = default;
  explicit Connection(Descriptor socket)
      : socket_(std::move(socket)), kept_(std::vector<int>{socket_.get()}) {}

  bool open() const { return socket_.valid(); }
  int fd() const { return socket_.get(); }
  /// Takes frames of any length from now on.
  void trust() { limit_ = UINT64_MAX; }

  /// Queues a frame; `pump` sends it.
  void send(FrameKind kind, std::shared_ptr<const std::string> payload);
  void send(FrameKind kind, std::string payload = {}) {
    send(kind, std::make_shared<const std::string>(std::move(payload)));
  }
  bool sending() const { return !outgoing_.empty() && !broken_; }
  /// Whether frames were queued that can no longer be sent.
  bool undeliverable() const { return !outgoing_.empty() && (broken_ || ended_); }

  /// Complete frames, oldest first.
  std::deque<Frame>& received() { return received_; }
  /// Takes the oldest; nothing where none is complete.
  std::optional<Frame> take();
  /// Whether a frame has arrived or has begun to.
  bool receiving() const { return !received_.empty() || header_bytes_ > 0; }
  /// Whether the other end has closed the connection or has sent what is no frame.
  bool ended() const { return ended_; }

  /// Move bytes without waiting; return whether any moved.
  bool read_some();
  bool write_some();

 private:
  struct Header {
    std::uint32_t magic;
    FrameKind kind;
    std::uint64_t length;
  };
  struct Outgoing {
    Header header;
    std::shared_ptr<const std::string> payload;
    std::size_t sent;  // of header and payload together
  };

  void finish_header();
  void finish_frame();
  std::size_t receive(char* to, std::size_t bytes);
  std::size_t receive_header();
  std::size_t receive_payload();

  Descriptor socket_;
  KeptFromChildren kept_;
  std::uint64_t limit_ = kStrangerLimit;
  bool ended_ = false;   // nothing more can be read
  bool broken_ = false;  // nothing more can be written
  std::deque<Outgoing> outgoing_;
  std::deque<Frame> received_;
  Header header_{};
  std::size_t header_bytes_ = 0;
  std::string payload_;
};

/// Waits until one of the connections can move bytes, `also` (a listening socket, or -1) has a
/// visitor, or `until`; moves what can be moved. Returns whether bytes moved.
bool pump(const std::vector<Connection*>& connections, Deadline until, int also = -1);

}  // namespace uniep::tcp
