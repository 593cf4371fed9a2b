#pragma once

#include "schedule/queue.h"

// What a host sends back of another host's tokens, as both find it from the routing of all ranks.

namespace uniep {

/// The rank whose tokens a task of relay is of: the one of this rank's rail on the task's host.
inline UNIEP_HD int relayed_source(const PassView& v, const Task& task) {
  return v.layout.relay(v.rank, static_cast<int>(task.n));
}

/// Tokens [begin, end) of a block of a rank's tokens.
struct TokenRange {
  std::int64_t begin = 0, end = 0;
};
inline UNIEP_HD TokenRange tokens_of_block(const PassView& v, int source, std::int64_t block) {
  const std::int64_t tokens = v.tokens_of(source);
  const std::int64_t begin = min_of<std::int64_t>(block * v.schedule.token_block, tokens);
  return {begin, min_of<std::int64_t>(begin + v.schedule.token_block, tokens)};
}

/// Slots of a block of a rank's tokens whose expert is on a rank of which `chosen(rank)`.
template <class Chosen>
UNIEP_HD std::int64_t count_slots(const PassView& v, int source, std::int64_t block,
                                  Chosen&& chosen) {
  const auto [begin, end] = tokens_of_block(v, source, block);
  std::int64_t slots = 0;
  for (const std::int32_t* id = v.ids_of(source, begin); id != v.ids_of(source, end); ++id) {
    if (*id >= 0 && chosen(v.rank_of_expert(*id))) ++slots;
  }
  return slots;
}

/// Whether anything of a block of a rank's tokens comes back from `host`.
inline UNIEP_HD bool returns_from(const PassView& v, int source, std::int64_t block, int host) {
  return count_slots(v, source, block, [&](int rank) { return v.layout.host_of(rank) == host; }) >
         0;
}

}  // namespace uniep
