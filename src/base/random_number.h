#pragma once

#include <sys/random.h>

#include <cstdint>

#include "base/check.h"

namespace uniep {

/// A number that nobody else has.
inline std::uint64_t random_number() {
  std::uint64_t number = 0;
  ensure(getrandom(&number, sizeof(number), 0) == sizeof(number), "no random numbers");
  return number;
}

}  // namespace uniep
