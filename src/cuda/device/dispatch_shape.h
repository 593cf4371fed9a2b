#pragma once

namespace uniep::cuda {

inline constexpr int kDispatchWarps = 12;  // of a CTA, while it dispatches

}  // namespace uniep::cuda
