#pragma once

#include <bit>
#include <cstdint>

#include "base/math.h"
#include "graph/graph.h"
#include "uniep/problem.h"

namespace uniep {

/// What a page of a row pool holds: row_align rows of every tensor of rows that is saved. If tokens
/// are kept in place of rows of x, some of these, too: apart, in further pages, where they take the
/// place of h; or beside the rows, in memory of their own, where h is not kept or a page of it has
/// no room for a token.
struct PageShape {
  std::int32_t shift = 0;          // it has 1 << shift rows
  std::int32_t tokens = 0;         // that a page has room for; 0: none are kept
  std::int32_t token_shift = 0;    // that many at most take 1 << token_shift numbers
  std::uint32_t token_factor = 0;  // 2^(31 + token_shift) / tokens, rounded up
  std::int64_t token_stride = 0;   // elements from the tokens of a page to those of the next
  bool tokens_apart = false;

  /// Room for them in each page, whatever else is there.
  std::int64_t tokens_beside_rows() const { return tokens_apart ? 0 : tokens; }

  /// token / tokens: a division takes registers that kernels do not have to spare. What the factor
  /// was rounded by adds less than 1 / tokens, for any `token` of 31 bits.
  UNIEP_HD std::int32_t group_of(std::int32_t token) const {
    return static_cast<std::int32_t>(
        std::uint64_t{static_cast<std::uint32_t>(token)} * token_factor >> (31 + token_shift));
  }

  /// In a plan's table of pages, the first that has tokens: rows come first.
  UNIEP_HD std::int64_t first_of_tokens(std::int64_t rows) const {
    return tokens_apart ? rows >> shift : 0;
  }
  /// Pages of so many rows, padding included, and the tokens that they are copies of.
  UNIEP_HD std::int64_t pages_of(std::int64_t rows, std::int64_t received) const {
    if (tokens == 0) return rows >> shift;
    return max_of(rows >> shift, first_of_tokens(rows) + ceil_div<std::int64_t>(received, tokens));
  }

  /// More than any memory has; few enough that numbers of rows and tokens fit 32 bits.
  std::int64_t most_pages() const {
    return min_of(std::int64_t{1} << 22,
                  (std::int64_t{1} << 35) / max_of<std::int64_t>(token_stride, 1));
  }
};

inline PageShape page_shape(const Problem& p) {
  PageShape shape;
  shape.shift = std::countr_zero(static_cast<unsigned>(p.row_align));
  const GraphChoice choice = choice_of(p);
  if (!keeps_received(choice)) return shape;
  const std::int64_t h = std::int64_t{p.row_align} * halves(p) * p.intermediate;
  shape.tokens_apart = !choice.drops_h && h >= p.hidden;
  // Beside the rows, so few that those of up to 16 rows each fill their pages.
  const std::int64_t tokens = shape.tokens_apart ? h / p.hidden : ceil_div(p.row_align, 16);
  shape.tokens = static_cast<std::int32_t>(tokens);
  shape.token_shift = std::bit_width(static_cast<unsigned>(tokens - 1));
  shape.token_factor = static_cast<std::uint32_t>(
      ceil_div<std::int64_t>(std::int64_t{1} << (31 + shape.token_shift), tokens));
  shape.token_stride = shape.tokens_apart ? h : tokens * p.hidden;
  return shape;
}

}  // namespace uniep
