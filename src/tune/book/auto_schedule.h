#pragma once

#include <functional>
#include <string>

#include "group/bootstrap.h"
#include "tune/book/schedule_book.h"
#include "uniep/rank_layout.h"

namespace uniep::tune {

/// The schedules of a layer's directions, each chosen by itself.
struct LayerSchedules {
  ScheduleChoice forward;
  ScheduleChoice backward;
};

/// "auto: forward cache, backward default": where these were found, for reports.
std::string origin_text(const LayerSchedules& schedules);

/// What a ScheduleBook of this machine's cache and of what is shipped says for a layer whose ranks
/// hold up to `problem.max_tokens` tokens. The cache is read once a process, and what of it cannot
/// be used is reported on stderr then; so it is for one rank to call. The first call for a problem
/// may take seconds, where the model is asked; from then on it is a search in memory.
LayerSchedules look_up_schedules(Backend backend, const Problem& problem, const RankLayout& layout,
                                 double skew);

/// Lets layers that are made from now on see what was stored in a cache meanwhile: it is read
/// again.
void read_caches_again();

/// Longer than the model needs for any layer: what `look_up_schedules` on rank 0 may take.
inline constexpr int kLongestChoiceMs = 60000;

/// Limit in milliseconds of waits of `rank` in a search, in a layer whose waits have `limit_ms`:
/// rank 0 may be choosing what to measure.
int limit_of_search_ms(int limit_ms, int rank);

/// Collective: what `choose` returns on rank 0, the only one that calls it, on all ranks. Where it
/// throws, or `call` (what is chosen, in words) differs by rank, all ranks throw the same Error. A
/// rank that does not come is missed after `limit_ms`; then rank 0 may take `choice_ms`.
LayerSchedules agree_on_schedules(Bootstrap& bootstrap, int rank, int limit_ms, int choice_ms,
                                  const std::string& call,
                                  const std::function<LayerSchedules()>& choose);

}  // namespace uniep::tune
