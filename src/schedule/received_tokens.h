#pragma once

#include "schedule/pass_view.h"

// Where tensor `received` has the tokens that a rank received, if forward keeps them.

namespace uniep {

/// The number of the token that a pull brings: that of its pull in canonical order, so that it does
/// not depend on a schedule.
inline UNIEP_HD std::int32_t received_token(const PassView& v, const Pull& pull) {
  return v.pull_of_row[v.pull_rows[pull.first_row]];
}

/// Whether this pull stores that token. Where rows are pulled one by one, that of the token's first
/// row does.
inline UNIEP_HD bool keeps_token(const PassView& v, const Pull& pull, std::int32_t token) {
  return pull.first_row == 0 || v.pull_of_row[v.pull_rows[pull.first_row - 1]] != token;
}

/// Places are counted in so many elements, of which H is a multiple: so they fit 32 bits.
inline constexpr int kPlaceElements = 8;

/// Where token number `token` lies: with a row pool, in one of the plan's pages. `Int`: that it is
/// computed in; kernels have no registers to spare for 64 bits.
template <class Int = std::int64_t>
UNIEP_HD Int received_place(const PassView& v, std::int32_t token) {
  const Int width = static_cast<Int>(v.hidden) / Int{kPlaceElements};
  if (v.pages == nullptr) return static_cast<Int>(token) * width;
  const PageShape& shape = v.page_shape;
  const auto first =
      static_cast<std::int32_t>(shape.first_of_tokens(v.segment_begin[v.num_local_experts]));
  const std::int32_t group = shape.group_of(token);
  const auto stride = static_cast<Int>(shape.token_stride / kPlaceElements);
  return static_cast<Int>(v.pages[first + group]) * stride +
         static_cast<Int>(token - group * shape.tokens) * width;
}

}  // namespace uniep
