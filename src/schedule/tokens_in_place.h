#pragma once

#include "schedule/pass_view.h"

// Rows of a shared expert are this rank's tokens, one after another. So its tiles read x and dy
// where the caller has them and wait for nobody, and dispatch brings no rows of it.

namespace uniep {

/// Whether dispatch brings rows of shared experts all the same: of dy, where these are multiplied
/// with their probabilities, and in a ring of rows, where dispatch waits for room.
inline UNIEP_HD bool dispatches_shared(const PassView& v) {
  const bool weighs = v.probs == Probs::kAfter && v.shared_gate;
  return v.pass == Pass::kBackward && (weighs || v.ring_rows > 0);
}

/// Whether dispatch brings the expert's rows.
inline UNIEP_HD bool is_dispatched(const PassView& v, int expert) {
  return dispatches_shared(v) || !v.is_shared(expert);
}

/// How many of a pull's rows dispatch brings: rows of shared experts are a token's last.
inline UNIEP_HD std::int32_t dispatched_rows(const PassView& v, const Pull& pull) {
  if (pull.source != v.rank || dispatches_shared(v)) return pull.num_rows;
  return pull.num_rows - v.shared_experts;
}

/// What the rows of a tensor are copies of; kNone: of nothing.
template <Tensor rows>
inline constexpr Tensor kTokensOf = rows == Tensor::kXRows    ? Tensor::kX
                                    : rows == Tensor::kDyRows ? Tensor::kDy
                                                              : Tensor::kNone;

/// Whether the expert's tiles read tokens where they lie, and not that tensor of rows.
template <Tensor rows>
UNIEP_HD bool is_in_place(const PassView& v, int expert) {
  if constexpr (kTokensOf<rows> == Tensor::kNone) return false;
  return v.is_shared(expert) && (rows != Tensor::kDyRows || !dispatches_shared(v));
}

}  // namespace uniep
