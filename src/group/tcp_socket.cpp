#include "group/tcp_socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/check.h"
#include "base/quotes.h"

namespace uniep::tcp {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

/// 0 and the addresses, or the error of getaddrinfo that says why not.
int look_up(const std::string& address, int port, Addresses& found) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error == 0) found.reset(list);
  return error;
}

void require_found(int error, const std::string& address) {
  require(error == 0, ErrorCode::kInvalidArgument, "MASTER_ADDR is ", in_quotes(address), " (",
          gai_strerror(error), "); the name or address of the host of rank 0 is accepted");
}

Addresses resolve(const std::string& address, int port) {
  Addresses found;
  require_found(look_up(address, port, found), address);
  return found;
}

/// The addresses; none if the name service cannot answer now: it may, once it has heard of rank 0's
/// host.
Addresses resolve_for_now(const std::string& address, int port) {
  Addresses found;
  const int error = look_up(address, port, found);
  if (error != EAI_AGAIN) require_found(error, address);
  return found;
}

Descriptor new_socket(const addrinfo& a) {
  return Descriptor(socket(a.ai_family, a.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

void send_at_once(int fd) {
  const int on = 1;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

/// 0, or the errno that says why not.
int bind_and_listen(const Descriptor& fd, const addrinfo& a, bool at_any_address) {
  const int on = 1;
  (void)setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in any{};
  const sockaddr* at = a.ai_addr;
  if (at_any_address) {
    any = *reinterpret_cast<const sockaddr_in*>(a.ai_addr);
    any.sin_addr.s_addr = htonl(INADDR_ANY);
    at = reinterpret_cast<const sockaddr*>(&any);
  }
  if (bind(fd.get(), at, a.ai_addrlen) != 0) return errno;
  return listen(fd.get(), 128) == 0 ? 0 : errno;
}

bool is_loopback(const in_addr& address) { return ntohl(address.s_addr) >> 24 == 127; }

bool is_loopback(const addrinfo& a) {
  return a.ai_family == AF_INET &&
         is_loopback(reinterpret_cast<const sockaddr_in*>(a.ai_addr)->sin_addr);
}

bool connected(const Descriptor& fd, Deadline until) {
  pollfd p{fd.get(), POLLOUT, 0};
  while (poll(&p, 1, until.poll_ms()) < 0 && errno == EINTR) {
  }
  int error = ETIMEDOUT;
  socklen_t size = sizeof(error);
  return p.revents != 0 && getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 &&
         error == 0;
}

}  // namespace

bool is_loopback(const std::string& digits) {
  in_addr address{};
  return inet_pton(AF_INET, digits.c_str(), &address) == 1 && is_loopback(address);
}

bool names_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || is_loopback(address);
}

Descriptor listen_at(const std::string& address, int port) {
  const Addresses list = resolve(address, port);
  int error = 0;
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    Descriptor fd = new_socket(*a);
    const bool of_this_host_alone = is_loopback(*a) && !names_loopback(address);
    error = fd.valid() ? bind_and_listen(fd, *a, of_this_host_alone) : errno;
    if (error == 0) return fd;
    if (error == EADDRINUSE) return Descriptor();
  }
  throw Error(ErrorCode::kInvalidArgument,
              cat("rank 0 cannot listen at MASTER_ADDR ", address, ", MASTER_PORT ", port, " (",
                  std::strerror(error), "); an address of its own host is accepted"));
}

Descriptor listen_at_any_port(const std::string& address) {
  Descriptor fd = listen_at(address, 0);
  require(fd.valid(), ErrorCode::kIo, "no free TCP port at address ", address);
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
  // Else nobody would be let in, and the listener have visitors for ever.
  const bool too_many = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
  require(fd.valid() || !too_many, ErrorCode::kIo, "rank 0 cannot let another rank in (",
          std::strerror(errno), "); more descriptors (ulimit -n) are accepted");
  if (fd.valid()) send_at_once(fd.get());
  return fd;
}

Descriptor connect_to(const std::string& address, int port, Deadline until) {
  const Addresses list = resolve_for_now(address, port);
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

std::string own_address_towards(const std::string& other) {
  constexpr int kAnyPort = 9;  // nothing is sent
  const Addresses list = resolve(other, kAnyPort);
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    if (a->ai_family != AF_INET) continue;
    const Descriptor fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_in own{};
    socklen_t size = sizeof(own);
    char text[INET_ADDRSTRLEN] = {};
    if (fd.valid() && connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 &&
        getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
        inet_ntop(AF_INET, &own.sin_addr, text, sizeof(text)) != nullptr) {
      return text;
    }
  }
  throw Error(ErrorCode::kIo, cat("no IPv4 address of this host reaches MASTER_ADDR ",
                                  in_quotes(other), "; a host that has one is accepted"));
}

}  // namespace uniep::tcp
