#pragma once

#include "schedule/pass_view.h"

// Where backward has room for fewer rows than the rank's (Problem::backward_rows), the tensors of
// the call are a ring of so many rows: row r of the plan lies at r modulo that. An expert's rows
// may be written when all that read the rows before them at those places are done: these are rows
// of experts that stand before it, since no expert has more rows than the ring.

namespace uniep {

/// Where tensors of the call have the row. Whole tiles lie together: a ring is a multiple of
/// row_align long.
inline UNIEP_HD std::int64_t ring_row(const PassView& v, std::int64_t row) {
  if (v.ring_rows == 0) return row;
  return static_cast<std::int64_t>(static_cast<std::uint32_t>(row) %
                                   static_cast<std::uint32_t>(v.ring_rows));
}

/// Calls f(expert) for those that had the expert's places in the ring before it. All that had them
/// still earlier were waited for by these.
template <class F>
UNIEP_HD void for_each_expert_before(const PassView& v, int expert, F&& f) {
  if (v.ring_rows == 0 || v.tokens_per_expert[expert] == 0) return;
  const std::int64_t begin = v.segment_begin[expert] - v.ring_rows;
  const std::int64_t end = v.segment_begin[expert + 1] - v.ring_rows;
  for (int e = expert - 1; e >= 0 && v.segment_begin[e + 1] > begin; --e) {
    if (v.segment_begin[e] < end && v.tokens_per_expert[e] > 0) f(e);
  }
}

/// By how many experts at most whoever reads an expert's rows last may follow whoever writes them
/// first, in one queue: every expert stands there behind the last reader of those before it.
inline UNIEP_HD int most_ring_lag(const PassView& v) {
  int most = v.num_local_experts;
  int before = 0;  // experts ahead of the last that had the places of those up to `e`
  for (int e = 0; e < v.num_local_experts; ++e) {
    while (before < e && v.segment_begin[before] < v.segment_begin[e + 1] - v.ring_rows) ++before;
    if (before > 0) most = min_of(most, e - before);
  }
  return most;
}

}  // namespace uniep
