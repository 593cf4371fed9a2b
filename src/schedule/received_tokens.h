#pragma once

#include "schedule/pass_view.h"

// Where a token that forward keeps lies among those that its rank received (tensor `received`).

namespace uniep {

/// The place of the token that a pull brings: that of its pull in canonical order, so that it does
/// not depend on a schedule.
inline UNIEP_HD std::int32_t received_place(const PassView& v, const Pull& pull) {
  return v.pull_of_row[v.pull_rows[pull.first_row]];
}

/// Whether this pull stores the token there. Where rows are pulled one by one, that of the token's
/// first row does.
inline UNIEP_HD bool keeps_token(const PassView& v, const Pull& pull, std::int32_t place) {
  return pull.first_row == 0 || v.pull_of_row[v.pull_rows[pull.first_row - 1]] != place;
}

}  // namespace uniep
