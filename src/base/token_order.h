#pragma once

#include <cstdint>

#include "base/math.h"
#include "base/outlined.h"
#include "uniep/problem.h"

namespace uniep {

/// The canonical order of the tokens of all ranks: by rank, then as each rank has them. Where
/// tokens of N hosts are gathered (Problem::gathered_hosts), by host first: a rank's are then N
/// blocks, and all ranks' blocks of a host stand ahead of those of the next.
struct TokenOrder {
  int ranks = 1;
  int hosts = 1;                 ///< N
  std::int64_t most_tokens = 0;  ///< of a rank: N blocks, each as long

  struct Token {
    int source = 0;
    std::int64_t token = 0;  ///< of that rank
  };

  constexpr UNIEP_HD std::int64_t of_block() const { return most_tokens / hosts; }
  constexpr UNIEP_HD std::int64_t of_host() const { return of_block() * ranks; }

  /// Numbers go through places for `most_tokens` of each rank, whether or not it has as many.
  constexpr UNIEP_HD std::int64_t number(int source, std::int64_t token) const {
    return hosts == 1 ? source * most_tokens + token : number_of_hosts(source, token);
  }
  /// The token with a number; there are some.
  constexpr UNIEP_HD UNIEP_OUTLINED Token token(std::int64_t number) const {
    const std::int64_t host = number / of_host();
    const std::int64_t in_host = number - host * of_host();
    const std::int64_t source = in_host / of_block();
    return {static_cast<int>(source), host * of_block() + in_host - source * of_block()};
  }

 private:
  constexpr UNIEP_HD UNIEP_OUTLINED std::int64_t number_of_hosts(int source,
                                                                 std::int64_t token) const {
    if (most_tokens == 0) return 0;
    const std::int64_t block = of_block();
    return (token / block * (ranks - 1) + source) * block + token;
  }
};

constexpr UNIEP_HD TokenOrder token_order(const Problem& problem, int num_ranks) {
  return {num_ranks, problem.gathered_hosts, problem.max_tokens};
}

}  // namespace uniep
