#pragma once

#include <string>

#include "comm/bootstrap.h"
#include "tune/schedule_book.h"
#include "uniep/problem.h"

namespace uniep::tool {

/// The word that stands for looking a schedule up.
inline constexpr const char* kAutoSchedule = "auto";

/// The schedule that is stored, shipped or predicted best for a pass on this machine. Of several
/// processes each looks for itself; `agree_on` makes them one. Files that cannot be used are
/// reported on stderr, where `speaks`.
tune::ScheduleChoice look_up(Backend backend, const Problem& problem, int ranks,
                             std::int64_t tokens, double skew, Pass pass, bool speaks);

/// Collective: rank 0's choice, on all ranks.
tune::ScheduleChoice agree_on(const tune::ScheduleChoice& own, Bootstrap& bootstrap);

}  // namespace uniep::tool
