// What excludes what, with the reason: the counterpart of kAxes for rules that concern more than
// one axis, the problem, or what a backend was built for.
#include "schedule/constraints.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "base/check.h"
#include "base/contract.h"
#include "schedule/open_sizes.h"

namespace uniep {
namespace {

using Violation = std::optional<std::string>;

static_assert(64 % kDprobGroup == 0, "the smallest tile_n must hold whole dprobs groups");

Violation needs_waves(const Schedule& s, const Problem&, const Place&) {
  if (s.waves >= 2) return std::nullopt;
  switch (s.launch) {
    case LaunchGrouping::kPipelined:
      return "launch=pipelined needs at least 2 waves, for there is nothing to overlap in one";
    case LaunchGrouping::kWaves:
      return "launch=waves needs at least 2 waves, for one is launch=single";
    default:
      return std::nullopt;
  }
}

Violation divides_alignment(const Schedule& s, const Problem& problem, const Place&) {
  if (problem.row_align % s.tile_m == 0) return std::nullopt;
  return cat("tile_m=", s.tile_m, " does not divide the problem's row_align=", problem.row_align,
             ", so tiles would straddle experts");
}

Violation keeps_counts_small(const Schedule& s, const Problem& problem, const Place&) {
  const int tokens = with_sizes(s, problem).token_block;
  if (std::int64_t{tokens} * slots(problem) * problem.hidden <= kMaxCount) return std::nullopt;
  const int shared = problem.shared_experts;
  return cat("token_block=", tokens, " with topk=", problem.topk,
             shared > 0 ? cat(",shared_experts=", shared) : "", " and hidden=", problem.hidden,
             " makes arrival counters pass ", kMaxCount, " in one pass");
}

Violation has_cuda_tiles(const Schedule& s, const Problem&, const Place&) {
  const bool has_n = std::ranges::find(kCudaTileN, s.tile_n) != std::end(kCudaTileN);
  if (s.tile_m == kCudaTileM && has_n) return std::nullopt;
  return cat("the schedule has tile_m=", s.tile_m, ",tile_n=", s.tile_n,
             "; the CUDA backend accepts tile_m=", kCudaTileM,
             " with tile_n=128 or 256, such as default_schedule(Backend::kCuda) has");
}

Violation has_dispatchers(const Schedule& s, const Problem&, const Place&) {
  if (s.launch == LaunchGrouping::kSeparate || s.dispatch_workers > 0) return std::nullopt;
  return "the schedule has dispatch_workers=0; the CUDA backend accepts 1 or more";
}

Violation is_resident(const Schedule& s, const Problem&, const Place& place) {
  if (place.max_workers == 0 || s.workers <= place.max_workers) return std::nullopt;
  return cat("the schedule has workers=", s.workers, "; this device accepts 0 to ",
             place.max_workers, ", the SMs that a pass may hold");
}

constexpr Constraint kConstraints[] = {
    {{"`launch=pipelined` and `launch=waves` need `waves` of at least 2",
      "in one wave there is nothing to overlap, and one launch is `single`"},
     needs_waves},
    {{"`tile_m` divides the problem's `row_align`", "tiles would straddle experts"},
     divides_alignment},
    {{"`token_block` x K x H stays below 2^31",
      "arrival counters are compared by signed differences of 32 bits"},
     keeps_counts_small},
    {{"`tile_m=128`, and `tile_n` is 128 or 256",
      "a tile is 64 rows for each of two warpgroups; kernels are compiled for these widths",
      Backend::kCuda},
     has_cuda_tiles},
    {{"`dispatch_workers` of at least 1 where dispatch shares a launch",
      "all warps of a CTA dispatch before they take the roles of products, and none does so again",
      Backend::kCuda},
     has_dispatchers},
    {{"no more `workers` than the GPU has SMs",
      "a worker that is not resident could be waited for for ever", Backend::kCuda},
     is_resident},
};

Violation first_violation(const Schedule& s, const Problem& problem, const Place& place,
                          bool of_backend) {
  for (const Constraint& c : kConstraints) {
    if (c.info.backend.has_value() != of_backend) continue;
    if (of_backend && c.info.backend != place.backend) continue;
    if (Violation found = c.violation(s, problem, place)) return found;
  }
  return std::nullopt;
}

/// An axis out of its range, as set_axis puts it.
Violation out_of_range(const Schedule& s) {
  for (std::size_t i = 0; i < schedule_axes().size(); ++i) {
    try {
      Schedule copy = s;
      set_axis(copy, i, axis_value(s, i));
    } catch (const Error& e) {
      return e.what();
    }
  }
  return std::nullopt;
}

}  // namespace

std::span<const Constraint> constraints() { return kConstraints; }

std::span<const ConstraintInfo> schedule_constraints() {
  static const std::vector<ConstraintInfo> kInfos = [] {
    std::vector<ConstraintInfo> infos;
    for (const Constraint& c : kConstraints) infos.push_back(c.info);
    return infos;
  }();
  return kInfos;
}

std::optional<std::string> invalid_reason(const Schedule& s, const Problem& problem) {
  if (Violation found = out_of_range(s)) return found;
  return first_violation(s, problem, {}, false);
}

std::optional<std::string> backend_reason(const Schedule& schedule, const Place& place) {
  return first_violation(schedule, {}, place, true);
}

std::optional<std::string> invalid_reason(const Schedule& schedule, const Problem& problem,
                                          const Place& place) {
  if (Violation found = invalid_reason(schedule, problem)) return found;
  return backend_reason(schedule, place);
}

Schedule default_schedule_for(const Problem& problem, const Place& place) {
  Schedule lower = default_schedule(place.backend);
  lower.tile_m = std::min(lower.tile_m, problem.row_align);
  return invalid_reason(lower, problem, place) ? default_schedule(place.backend) : lower;
}

void validate(const Schedule& schedule, const Problem& problem) {
  const auto reason = invalid_reason(schedule, problem);
  require(!reason, ErrorCode::kInvalidArgument, "schedule cannot run: ", reason.value_or(""));
}

}  // namespace uniep
