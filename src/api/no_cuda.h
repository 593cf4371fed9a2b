#pragma once

namespace uniep {

/// What is said where this build lacks the CUDA backend.
inline constexpr const char* kNoCuda =
    "this build of uniep has no CUDA backend; one configured with -DUNIEP_CUDA=ON has";

}  // namespace uniep
