#include "group/tcp_connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

namespace uniep::tcp {
namespace {

constexpr std::uint32_t kFrameMagic = 0x316e7565;  // "uen1": the version of the frames

/// Bytes that one call moves at most, so that no connection starves the others.
constexpr std::size_t kBurst = 8 << 20;
constexpr std::size_t kChunk = 256 << 10;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

void Connection::send(FrameKind kind, std::shared_ptr<const std::string> payload) {
  const Header header{kFrameMagic, kind, payload->size()};
  outgoing_.push_back({header, std::move(payload), 0});
}

std::optional<Frame> Connection::take() {
  if (received_.empty()) return std::nullopt;
  Frame frame = std::move(received_.front());
  received_.pop_front();
  return frame;
}

bool Connection::write_some() {
  std::size_t moved = 0;
  while (!outgoing_.empty() && !broken_ && moved < kBurst) {
    Outgoing& o = outgoing_.front();
    const std::size_t of_header = std::min(o.sent, sizeof(Header));
    const std::size_t of_payload = o.sent - of_header;
    iovec parts[2] = {{reinterpret_cast<char*>(&o.header) + of_header, sizeof(Header) - of_header},
                      {const_cast<char*>(o.payload->data()) + of_payload,
                       std::min(o.payload->size() - of_payload, kBurst)}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t n = sendmsg(fd(), &message, MSG_NOSIGNAL);
    if (n < 0) {
      // What the other end sent before it closed can still be read, so reading finds the end.
      if (!would_block()) broken_ = true;
      break;
    }
    moved += static_cast<std::size_t>(n);
    o.sent += static_cast<std::size_t>(n);
    if (o.sent == sizeof(Header) + o.payload->size()) outgoing_.pop_front();
  }
  return moved > 0;
}

std::size_t Connection::receive(char* to, std::size_t bytes) {
  const ssize_t n = recv(fd(), to, bytes, 0);
  if (n > 0) return static_cast<std::size_t>(n);
  if (n == 0 || !would_block()) ended_ = true;
  return 0;
}

void Connection::finish_header() {
  if (header_.magic != kFrameMagic || header_.length > limit_) {
    ended_ = true;
    return;
  }
  payload_.clear();
  payload_.reserve(header_.length);
}

void Connection::finish_frame() {
  received_.push_back({header_.kind, std::move(payload_)});
  payload_ = {};
  header_bytes_ = 0;
}

std::size_t Connection::receive_header() {
  const std::size_t n =
      receive(reinterpret_cast<char*>(&header_) + header_bytes_, sizeof(Header) - header_bytes_);
  header_bytes_ += n;
  if (header_bytes_ == sizeof(Header)) finish_header();
  return n;
}

/// Room is made as bytes arrive: to touch all of a large payload's memory first would stop the flow
/// for as long as that takes.
std::size_t Connection::receive_payload() {
  const std::size_t have = payload_.size();
  const std::size_t want = std::min<std::size_t>(header_.length - have, kChunk);
  payload_.resize(have + want);
  const std::size_t n = receive(payload_.data() + have, want);
  payload_.resize(have + n);
  return n;
}

bool Connection::read_some() {
  std::size_t moved = 0;
  while (!ended_ && moved < kBurst) {
    const std::size_t n = header_bytes_ < sizeof(Header) ? receive_header() : receive_payload();
    if (n == 0) break;
    moved += n;
    if (!ended_ && header_bytes_ == sizeof(Header) && payload_.size() == header_.length) {
      finish_frame();
    }
  }
  return moved > 0;
}

bool pump(const std::vector<Connection*>& connections, Deadline until, int also) {
  std::vector<pollfd> polled;
  std::vector<Connection*> of_poll;
  for (Connection* c : connections) {
    if (!c->open() || c->ended()) continue;
    polled.push_back({c->fd(), static_cast<short>(c->sending() ? POLLIN | POLLOUT : POLLIN), 0});
    of_poll.push_back(c);
  }
  if (also >= 0) polled.push_back({also, POLLIN, 0});
  if (poll(polled.data(), polled.size(), until.poll_ms()) <= 0) return false;
  bool moved = false;
  for (std::size_t i = 0; i < of_poll.size(); ++i) {
    const short events = polled[i].revents;
    if (events & POLLOUT) moved |= of_poll[i]->write_some();
    if (events & (POLLIN | POLLHUP | POLLERR)) moved |= of_poll[i]->read_some();
  }
  return moved;
}

}  // namespace uniep::tcp
