#pragma once

#include <vector>

#include "rail/fabric_library.h"

namespace uniep::rail {

/// The descriptors of a connected endpoint of provider `tcp`, which the library does not tell:
/// those of this process that have the endpoint's two addresses. Nothing where they cannot be
/// looked at.
std::vector<int> sockets_of(fid_ep& endpoint);

}  // namespace uniep::rail
