#pragma once

#include <string>

#include "base/deadline.h"
#include "base/descriptor.h"

// TCP sockets that never block.

namespace uniep::tcp {

/// Whether an IPv4 address, as digits, is of the loopback interface.
bool is_loopback(const std::string& digits);

/// Whether a name or address means the loopback interface on every host.
bool names_loopback(const std::string& address);

/// A socket that listens at `address`:`port`; on all interfaces where the address is a name that
/// stands for the loopback interface here, as a host's own often does: others have another address
/// for it. Not valid where the port is taken; throws Error(kInvalidArgument) where the address
/// cannot be used.
Descriptor listen_at(const std::string& address, int port);

/// A listening socket at a free port of `address`.
Descriptor listen_at_any_port(const std::string& address);

/// The port that a socket is bound to.
int port_of(const Descriptor& socket);

/// The next visitor of a listening socket; not valid where there is none. Throws Error(kIo) where
/// this process has no descriptor for it.
Descriptor accept_from(const Descriptor& listener);

/// A connection to `address`:`port`; not valid where nobody answers until then, or where the name
/// service cannot say yet what the name stands for.
Descriptor connect_to(const std::string& address, int port, Deadline until);

/// The IPv4 address of this host from which `other` is reached, as digits. Throws Error(kIo).
std::string own_address_towards(const std::string& other);

}  // namespace uniep::tcp
