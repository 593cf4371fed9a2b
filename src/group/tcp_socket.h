#pragma once

#include <string>

#include "base/deadline.h"
#include "base/descriptor.h"

// TCP sockets that never block.

namespace uniep::tcp {

/// A socket that listens at `address`:`port`. Not valid where the port is taken; throws
/// Error(kInvalidArgument) where the address cannot be used.
Descriptor listen_at(const std::string& address, int port);

/// A listening socket at the first free port of the loopback interface.
Descriptor listen_at_loopback();

/// The port that a socket is bound to.
int port_of(const Descriptor& socket);

/// The next visitor of a listening socket; not valid where there is none.
Descriptor accept_from(const Descriptor& listener);

/// A connection to `address`:`port`; not valid where nobody answers until then.
Descriptor connect_to(const std::string& address, int port, Deadline until);

/// The address of this host from which `other` is reached, as digits. Throws Error(kIo).
std::string own_address_towards(const std::string& other);

}  // namespace uniep::tcp
