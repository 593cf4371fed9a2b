#pragma once

#include <string>

namespace uniep {

/// The IPv4 address, as digits, at which ranks of other hosts reach this one: that of
/// UNIEP_SOCKET_IFNAME, else the one from which `other` is reached (a name or address; empty: none
/// is known), else that of the first interface but loopback. Throws
/// Error(kInvalidArgument) where there is no such interface, and Error(kUnsupported) where none has
/// an address.
std::string own_address(const std::string& other);

}  // namespace uniep
