#pragma once

#include <exception>

#include "base/error_of.h"
#include "group/cpu_group.h"

namespace uniep::cpu {

/// Runs `body`, a part of a collective call. An Error is one that all ranks throw, or that has been
/// raised. Anything else, such as memory that ends, is this rank's alone: the others hear of it, so
/// that they do not wait for this rank until their limit.
template <class Body>
auto tell_lone_failure(CpuCommunicator& member, const Body& body) try {
  return body();
} catch (const Error&) {
  throw;
} catch (const std::exception& e) {
  member.group().failure().raise(member.rank(), error_of(e).what());
  throw;
}

}  // namespace uniep::cpu
