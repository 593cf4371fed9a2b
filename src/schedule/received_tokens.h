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

/// Where token number `token` lies: with a row pool, its page and the place there in one number.
inline UNIEP_HD std::int32_t received_place(const PassView& v, std::int32_t token) {
  if (v.pages == nullptr) return token;
  const PageShape& shape = v.page_shape;
  const std::int64_t first = shape.first_of_tokens(v.segment_begin[v.num_local_experts]);
  const std::int32_t group = shape.group_of(token);
  return v.pages[first + group] << shape.token_shift | (token - group * shape.tokens);
}

/// Elements of the tensor ahead of that place.
inline UNIEP_HD std::int64_t received_offset(const PassView& v, std::int32_t place) {
  if (v.pages == nullptr) return place * v.hidden;
  const PageShape& shape = v.page_shape;
  const std::int32_t token = place & ((1 << shape.token_shift) - 1);
  return (place >> shape.token_shift) * shape.token_stride + token * v.hidden;
}

}  // namespace uniep
