#pragma once

#include <chrono>
#include <deque>

#include "base/kept_from_children.h"
#include "rail/fabric_library.h"
#include "rail/wire.h"

namespace uniep::rail {

/// One endpoint of a rail: messages to and from the rank of one other host. Used by the rail's
/// thread alone.
class FabricConnection {
 public:
  using Clock = std::chrono::steady_clock;

  enum class State { kNone, kConnecting, kConnected, kEnded };

  /// What a completion is of.
  struct Operation {
    FabricConnection* connection = nullptr;
    bool is_receive = false;
  };
  struct Message {
    MessageKind kind = MessageKind::kBye;
    Bytes body{};
  };

  FabricConnection() = default;
  FabricConnection(const FabricConnection&) = delete;
  FabricConnection& operator=(const FabricConnection&) = delete;

  State state() const { return state_; }
  const fid* endpoint() const { return endpoint_ ? &endpoint_->fid : nullptr; }

  /// Begins to connect, to `info`'s destination; or accepts a request, of which `info` tells.
  void connect(fid_domain& domain, fid_eq& events, fid_cq& completions, fi_info& info,
               const Introduction& own);
  void accept(fid_domain& domain, fid_eq& events, fid_cq& completions, fi_info& info);
  /// The endpoint is connected: messages go both ways from now on.
  void begin();
  /// Nothing comes or goes any more.
  void end();

  /// Sends a message, not before `due`.
  void send(MessageKind kind, Bytes body, Clock::time_point due);
  /// Posts what is due; whether there was any.
  bool post(Clock::time_point now);
  /// Whether nothing is lost where the endpoint is closed now. What has been sent may still lie in
  /// the library, which drops it then; so the last messages are answered.
  bool is_done() const {
    return state_ == State::kEnded || (outgoing_.empty() && unanswered_ == 0);
  }
  /// When the next message becomes due that has not been posted.
  std::optional<Clock::time_point> next_due() const;

  /// A send has left its buffer.
  void sent();
  /// A receive is complete: a message, where that was its last part; answers are dealt with here.
  /// Throws Error(kIo) where it is none of a rail.
  std::optional<Message> received();

 private:
  struct Outgoing {
    Bytes bytes;
    Clock::time_point due;
  };

  void open(fid_domain& domain, fid_eq& events, fid_cq& completions, fi_info& info);
  void receive(void* to, std::size_t bytes);
  std::optional<Message> take_message();

  State state_ = State::kNone;
  Fid<fid_ep> endpoint_;
  KeptFromChildren sockets_;  // of the endpoint, which is closed behind this
  Operation send_{this, false};
  Operation receive_{this, true};
  std::deque<Outgoing> outgoing_;
  std::size_t posted_ = 0;  // of these, the first
  int unanswered_ = 0;      // messages that the peer has yet to hear
  MessageHeader header_;    // of the message that comes
  Bytes body_;
  bool in_body_ = false;
};

}  // namespace uniep::rail
