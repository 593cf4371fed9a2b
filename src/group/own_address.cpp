#include "group/own_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <memory>
#include <vector>

#include "base/check.h"
#include "base/env.h"
#include "base/quotes.h"
#include "group/tcp_socket.h"

namespace uniep {
namespace {

struct Interface {
  std::string name;
  std::string address;
  bool loopback;
};

struct FreeInterfaces {
  void operator()(ifaddrs* list) const { freeifaddrs(list); }
};

/// The interfaces that are up and have an IPv4 address, in the system's order.
std::vector<Interface> interfaces() {
  ifaddrs* first = nullptr;
  ensure(getifaddrs(&first) == 0, "no list of network interfaces");
  const std::unique_ptr<ifaddrs, FreeInterfaces> list(first);
  std::vector<Interface> found;
  for (const ifaddrs* i = first; i != nullptr; i = i->ifa_next) {
    const bool usable =
        i->ifa_addr != nullptr && i->ifa_addr->sa_family == AF_INET && (i->ifa_flags & IFF_UP) != 0;
    if (!usable) continue;
    char text[INET_ADDRSTRLEN] = {};
    const auto* address = reinterpret_cast<const sockaddr_in*>(i->ifa_addr);
    if (inet_ntop(AF_INET, &address->sin_addr, text, sizeof(text)) == nullptr) continue;
    found.push_back({i->ifa_name, text, (i->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return found;
}

std::string address_of(const std::string& interface) {
  std::string names;
  for (const Interface& i : interfaces()) {
    if (i.name == interface) return i.address;
    names += cat(names.empty() ? "" : ", ", i.name);
  }
  throw Error(ErrorCode::kInvalidArgument,
              cat("environment variable UNIEP_SOCKET_IFNAME is ", in_quotes(interface),
                  "; an interface of this host with an IPv4 address is accepted: ", names));
}

}  // namespace

std::string own_address(const std::string& other) {
  const std::string interface = env_socket_interface();
  if (!interface.empty()) return address_of(interface);
  const std::string towards = other.empty() ? "" : tcp::own_address_towards(other);
  // A host often has its own name stand for the loopback interface, which other hosts do not reach.
  const bool of_this_host_alone = tcp::is_loopback(towards) && !tcp::names_loopback(other);
  if (!towards.empty() && !of_this_host_alone) return towards;
  for (const Interface& i : interfaces()) {
    if (!i.loopback) return i.address;
  }
  throw Error(ErrorCode::kUnsupported,
              "the group is on several hosts, and this one has no IPv4 address but loopback; one "
              "that the others reach is accepted (UNIEP_SOCKET_IFNAME names its interface)");
}

}  // namespace uniep
