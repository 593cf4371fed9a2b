#include "schedule/open_sizes.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace uniep {
namespace {

int share_of(std::int64_t tokens, int shares, int most) {
  const auto whole = std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(tokens, 1)));
  return static_cast<int>(std::clamp<std::uint64_t>(whole / static_cast<unsigned>(shares), 1,
                                                    static_cast<unsigned>(most)));
}

}  // namespace

Schedule with_sizes(const Schedule& schedule, const Problem& problem) {
  Schedule s = schedule;
  const bool dispatch_alone = s.launch == LaunchGrouping::kSeparate;
  if (s.pull_tokens == 0) {
    s.pull_tokens = share_of(problem.max_tokens, 1024, dispatch_alone ? 2 : 8);
  }
  if (s.token_block == 0) s.token_block = share_of(problem.max_tokens, 128, 32);
  return s;
}

}  // namespace uniep
