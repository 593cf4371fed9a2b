#include "schedule/open_sizes.h"

#include <algorithm>
#include <bit>

#include "base/problem_limits.h"
#include "schedule/token_waves.h"

namespace uniep {
namespace {

int share_of(std::int64_t tokens, std::int64_t shares, std::int64_t most) {
  return static_cast<int>(std::clamp<std::int64_t>(token_bucket(tokens) / shares, 1, most));
}

}  // namespace

std::int64_t token_bucket(std::int64_t tokens) {
  return tokens <= 0 ? 0
                     : static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(tokens)));
}

Schedule with_sizes(const Schedule& schedule, const Problem& problem) {
  Schedule s = schedule;
  const bool dispatch_alone = s.launch == LaunchGrouping::kSeparate;
  if (s.pull_tokens == 0) {
    s.pull_tokens = share_of(problem.max_tokens, 1024, dispatch_alone ? 2 : 8);
  }
  if (s.token_block == 0) s.token_block = share_of(problem.max_tokens, 128, 32);
  if (s.wgrad_run == 0) {
    const std::int64_t tiles = problem.num_experts *
                               ceil_div<std::int64_t>(problem.hidden, s.tile_m) *
                               ceil_div<std::int64_t>(problem.intermediate, s.tile_n);
    s.wgrad_run = static_cast<int>(std::clamp<std::int64_t>(tiles / 128, 1, 8));
  }
  return s;
}

Schedule in_ring(Schedule s) {
  // On its own, dispatch has all workers, however many these are; 0 of them would put its tasks
  // in the queue of all others.
  if (s.launch == LaunchGrouping::kSeparate) s.dispatch_workers = std::max(s.dispatch_workers, 1);
  s.launch = LaunchGrouping::kSingle;
  s.waves = 1;
  s.wgrad = WgradPlacement::kInterleaved;
  s.dispatch_wire = DispatchWire::kRows;
  s.expert_order = ExpertOrder::kIndex;
  s.head_start = 0;
  if (s.workers > 0) s.dispatch_workers = std::min(s.dispatch_workers, s.workers - 1);
  return s;
}

static_assert(num_token_waves(kMaxHostsInWaves, Pass::kForward) <= kMostWaves);

Schedule in_token_waves(Schedule s, const Problem& problem, Pass pass) {
  if (s.launch == LaunchGrouping::kSeparate) s.dispatch_workers = std::max(s.dispatch_workers, 1);
  s.launch = LaunchGrouping::kWaves;
  s.waves = num_token_waves(problem.gathered_hosts, pass);
  return s;
}

Schedule with_forced_axes(const Schedule& schedule, const Problem& problem, Pass pass) {
  if (pass == Pass::kBackward && problem.backward_rows > 0) return in_ring(schedule);
  if (problem.gathered_hosts > 1 && problem.first_host >= 0) {
    return in_token_waves(schedule, problem, pass);
  }
  return schedule;
}

Schedule schedule_of_pass(const Schedule& schedule, const Problem& problem, Pass pass) {
  Schedule s = with_sizes(with_forced_axes(schedule, problem, pass), problem);
  if (problem.gathered_hosts == 1) return s;
  // A block of tokens has those of one host, and of one wave.
  const auto of_host = static_cast<std::uint64_t>(problem.max_tokens / problem.gathered_hosts);
  if (of_host > 0)
    s.token_block = std::min(s.token_block, 1 << std::min(std::countr_zero(of_host), 8));
  return s;
}

}  // namespace uniep
