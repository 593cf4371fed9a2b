#pragma once

#include <cstdint>
#include <type_traits>

#include "uniep/macros.h"

namespace uniep {

/// A bijection under which each bit of the result depends on all of `z`: the finaliser of
/// SplitMix64 (Steele, Lea, Flood 2014).
UNIEP_HD inline std::uint64_t mixed_bits(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/// Takes a number into a hash.
UNIEP_HD inline std::uint64_t hash_with(std::uint64_t hash, std::uint64_t value) {
  return mixed_bits(hash ^ value) + 0x9e3779b97f4a7c15u;  // zeros, too, change it
}

/// A hash of the integers of a range, in their order.
template <class Range>
std::uint64_t hash_of(const Range& values) {
  std::uint64_t hash = 0;
  for (auto value : values) {
    hash = hash_with(hash, static_cast<std::make_unsigned_t<decltype(value)>>(value));
  }
  return hash;
}

}  // namespace uniep
