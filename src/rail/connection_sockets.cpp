#include "rail/connection_sockets.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <charconv>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>

namespace uniep::rail {
namespace {

struct Ends {
  sockaddr_in own{}, peer{};
};

bool same(const sockaddr_in& a, const sockaddr_in& b) {
  return a.sin_family == AF_INET && b.sin_family == AF_INET && a.sin_port == b.sin_port &&
         a.sin_addr.s_addr == b.sin_addr.s_addr;
}

std::optional<Ends> ends_of(fid_ep& endpoint) {
  Ends ends;
  std::size_t own = sizeof(ends.own), peer = sizeof(ends.peer);
  if (fi_getname(&endpoint.fid, &ends.own, &own) != 0) return std::nullopt;
  if (fi_getpeer(&endpoint, &ends.peer, &peer) != 0) return std::nullopt;
  return ends;
}

std::optional<Ends> ends_of(int descriptor) {
  Ends ends;
  socklen_t own = sizeof(ends.own), peer = sizeof(ends.peer);
  if (getsockname(descriptor, reinterpret_cast<sockaddr*>(&ends.own), &own) != 0 ||
      getpeername(descriptor, reinterpret_cast<sockaddr*>(&ends.peer), &peer) != 0) {
    return std::nullopt;
  }
  return ends;
}

}  // namespace

std::vector<int> sockets_of(fid_ep& endpoint) {
  std::vector<int> found;
  const auto wanted = ends_of(endpoint);
  if (!wanted) return found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const std::string name = entry.path().filename().string();
    int descriptor = -1;
    std::from_chars(name.data(), name.data() + name.size(), descriptor);
    const auto ends = ends_of(descriptor);
    if (ends && same(ends->own, wanted->own) && same(ends->peer, wanted->peer)) {
      found.push_back(descriptor);
    }
  }
  return found;
}

}  // namespace uniep::rail
