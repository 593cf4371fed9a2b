#pragma once

#include <exception>
#include <new>

#include "uniep/error.h"

namespace uniep {

/// Any exception as an Error, for ranks and callers that get its sentence only.
inline Error error_of(const std::exception& e) {
  if (const auto* own = dynamic_cast<const Error*>(&e)) return *own;
  if (dynamic_cast<const std::bad_alloc*>(&e) != nullptr) {
    return {ErrorCode::kCapacity,
            "out of memory; a smaller layer or a higher limit of memory is accepted"};
  }
  return {ErrorCode::kInternal, e.what()};
}

/// The exception that is being handled, whatever it is, as an Error.
inline Error current_error() {
  try {
    throw;
  } catch (const std::exception& e) {
    return error_of(e);
  } catch (...) {
    return {ErrorCode::kInternal, "an exception of an unknown type"};
  }
}

}  // namespace uniep
