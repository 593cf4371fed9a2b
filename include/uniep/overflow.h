#pragma once

#include <cstdint>

namespace uniep {

/// Why a routing does not fit: element 0 of CallOptions::overflow. `UNIEP_OVERFLOW_...` in C,
/// `uniep.Overflow` in Python. Element 1 is what would do.
enum class Overflow : std::int64_t {
  kNone,        ///< it fits; element 1: as with kRows
  kRows,        ///< a rank receives too many; the capacity_rows that would do
  kImpossible,  ///< an id of no expert, or more tokens than there may be; 0
  kPages,       ///< a row pool is too full; the bytes of one that would do
  kExpertRows,  ///< an expert has more than Problem::backward_rows; those that would do
};

}  // namespace uniep
