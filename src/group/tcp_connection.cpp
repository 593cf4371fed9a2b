#include "group/tcp_connection.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace uniep::tcp {
namespace {

constexpr std::uint32_t kFrameMagic = 0x316e7565;  // "uen1": the version of the frames

/// Bytes that one call moves at most, so that no connection starves the others.
constexpr std::size_t kBurst = 8 << 20;
constexpr std::size_t kChunk = 256 << 10;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

int poll_milliseconds(Clock::time_point until) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000));
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Addresses resolve(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list);
  require(error == 0, ErrorCode::kInvalidArgument, "MASTER_ADDR is '", address, "' (",
          gai_strerror(error), "); the name or address of the host of rank 0 is accepted");
  return Addresses(list);
}

Descriptor new_socket(const addrinfo& a) {
  return Descriptor(socket(a.ai_family, a.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

void send_at_once(int fd) {
  const int on = 1;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

/// 0, or the errno that says why not.
int bind_and_listen(const Descriptor& fd, const addrinfo& a) {
  const int on = 1;
  (void)setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd.get(), a.ai_addr, a.ai_addrlen) != 0) return errno;
  return listen(fd.get(), 128) == 0 ? 0 : errno;
}

bool connected(const Descriptor& fd, Clock::time_point until) {
  pollfd p{fd.get(), POLLOUT, 0};
  while (poll(&p, 1, poll_milliseconds(until)) < 0 && errno == EINTR) {
  }
  int error = ETIMEDOUT;
  socklen_t size = sizeof(error);
  return p.revents != 0 && getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 &&
         error == 0;
}

}  // namespace

void Descriptor::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void Connection::send(FrameKind kind, std::shared_ptr<const std::string> payload) {
  const Header header{kFrameMagic, kind, payload->size()};
  outgoing_.push_back({header, std::move(payload), 0});
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

bool pump(const std::vector<Connection*>& connections, Clock::time_point until, int also) {
  std::vector<pollfd> polled;
  std::vector<Connection*> of_poll;
  for (Connection* c : connections) {
    if (!c->open() || c->ended()) continue;
    polled.push_back({c->fd(), static_cast<short>(c->sending() ? POLLIN | POLLOUT : POLLIN), 0});
    of_poll.push_back(c);
  }
  if (also >= 0) polled.push_back({also, POLLIN, 0});
  if (poll(polled.data(), polled.size(), poll_milliseconds(until)) <= 0) return false;
  bool moved = false;
  for (std::size_t i = 0; i < of_poll.size(); ++i) {
    const short events = polled[i].revents;
    if (events & POLLOUT) moved |= of_poll[i]->write_some();
    if (events & (POLLIN | POLLHUP | POLLERR)) moved |= of_poll[i]->read_some();
  }
  return moved;
}

Descriptor listen_at(const std::string& address, int port) {
  const Addresses list = resolve(address, port);
  int error = 0;
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    Descriptor fd = new_socket(*a);
    error = fd.valid() ? bind_and_listen(fd, *a) : errno;
    if (error == 0) return fd;
    if (error == EADDRINUSE) return Descriptor();
  }
  throw Error(ErrorCode::kInvalidArgument,
              cat("rank 0 cannot listen at MASTER_ADDR ", address, ", MASTER_PORT ", port, " (",
                  std::strerror(error), "); an address of its own host is accepted"));
}

Descriptor listen_at_loopback() {
  Descriptor fd = listen_at("127.0.0.1", 0);
  require(fd.valid(), ErrorCode::kIo, "no free TCP port on the loopback interface");
  return fd;
}

int port_of(const Descriptor& socket) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  const int error = getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size);
  ensure(error == 0 && address.sin_family == AF_INET, "a socket without a port");
  return ntohs(address.sin_port);
}

Descriptor accept_from(const Descriptor& listener) {
  Descriptor fd(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (fd.valid()) send_at_once(fd.get());
  return fd;
}

Descriptor connect_to(const std::string& address, int port, Clock::time_point until) {
  const Addresses list = resolve(address, port);
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    Descriptor fd = new_socket(*a);
    if (!fd.valid()) continue;
    const bool begun =
        connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 || errno == EINPROGRESS || errno == EINTR;
    if (!begun || !connected(fd, until)) continue;
    send_at_once(fd.get());
    return fd;
  }
  return Descriptor();
}

}  // namespace uniep::tcp
