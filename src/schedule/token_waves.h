#pragma once

#include "base/token_order.h"
#include "schedule/pass_view.h"

// Tokens that come in waves. Where tokens of N hosts are gathered ahead of a pass
// (Problem::gathered_hosts), those of one host are there first, and the others come host by host.
// In their order (TokenOrder) tokens are those of host 0, then of host 1, and so on; each wave has
// a run of them:
//
//   forward   the second half of the first host's; those of each other host, from the next one on;
//             the first half of the first host's, while sums of the others' go back
//   backward  those of the first host; those of each other
//
// A tile of rows may have tokens of several waves. It is taken in the wave that its last tokens
// come with. So behind the waves of others all of their tokens are complete, and behind the last
// all. From three hosts on forward has one wave more, without tokens of its own, ahead of that of
// the last other host: the seam, which takes the tiles that have tokens of this host and of others
// before. Behind it the tokens of these are complete, and their sums go back under two more waves.

namespace uniep {

constexpr UNIEP_HD bool has_seam(int hosts, Pass pass) {
  return pass == Pass::kForward && hosts > 2;
}

constexpr UNIEP_HD int num_token_waves(int hosts, Pass pass) {
  return (pass == Pass::kForward ? hosts + 1 : hosts) + (has_seam(hosts, pass) ? 1 : 0);
}

/// Tokens [begin, end), by their numbers in the order of all ranks' or as one rank has them.
struct TokenRun {
  std::int64_t begin = 0, end = 0;
};

inline UNIEP_HD TokenOrder token_order(const PassView& v) {
  return {v.num_ranks, v.gathered_hosts, v.most_tokens};
}

/// The first token of the host that comes `behind` hosts after the first.
inline UNIEP_HD std::int64_t first_token_of_host(const PassView& v, int behind) {
  return (v.first_host + behind) % v.gathered_hosts * token_order(v).of_host();
}

/// The seam has none, and begins with the first of the wave behind it.
inline UNIEP_HD std::int64_t first_token_of_wave(const PassView& v, int wave) {
  const bool is_behind_seam = has_seam(v.gathered_hosts, v.pass) && wave >= v.gathered_hosts;
  const std::int64_t first = first_token_of_host(v, wave - (is_behind_seam ? 1 : 0));
  if (wave > 0 || v.pass == Pass::kBackward) return first;
  const std::int64_t block = v.schedule.token_block;
  return first + token_order(v).of_host() / 2 / block * block;
}

/// The tokens of a wave, of all ranks.
inline UNIEP_HD TokenRun tokens_of_wave(const PassView& v, int wave) {
  const std::int64_t begin = first_token_of_wave(v, wave);
  const std::int64_t next = first_token_of_wave(v, (wave + 1) % v.schedule.waves);
  // Token 0 begins a wave, so none goes past the last.
  return {begin, next >= begin ? next : v.most_tokens * v.num_ranks};
}

/// The part that is this rank's, of a run that begins with a token and has those of one host.
inline UNIEP_HD TokenRun own_part(const PassView& v, const TokenRun& run) {
  const TokenOrder order = token_order(v);
  if (order.of_block() == 0) return {};
  const std::int64_t host = run.begin / order.of_host();
  const std::int64_t own = host * order.of_block();
  const std::int64_t first = host * order.of_host() + v.rank * order.of_block();  // number of `own`
  const auto token = [&](std::int64_t number) {
    return min_of(own + clamp_to<std::int64_t>(number - first, 0, order.of_block()), v.tokens);
  };
  return {token(run.begin), token(run.end)};
}
inline UNIEP_HD TokenRun own_tokens_of_wave(const PassView& v, int wave) {
  return own_part(v, tokens_of_wave(v, wave));
}

/// This rank's tokens that may be read from a wave on: both halves of the first host's with the
/// first, since waves of others take tiles that have some of them. A block of TokenOrder.
inline UNIEP_HD TokenRun own_tokens_that_come(const PassView& v, int wave) {
  if (wave >= v.gathered_hosts) return {};
  const std::int64_t begin = first_token_of_host(v, wave);
  return own_part(v, {begin, begin + token_order(v).of_host()});
}

/// Waves that follow one another.
struct WaveRun {
  int first = 0, count = 0;
};

/// The waves of other hosts' tokens that are complete after a launch, and were not before it. Their
/// results are wanted before the pass ends.
inline UNIEP_HD WaveRun waves_done_early(const PassView& v, int launch) {
  if (!v.comes_in_waves() || v.pass == Pass::kBackward) return {};
  const int others = v.gathered_hosts - 1;  // waves, the last of which is the seam if there is one
  if (launch == others) return {1, others};
  if (launch == others + 1 && has_seam(v.gathered_hosts, v.pass)) return {launch, 1};
  return {};
}

/// The first row of an expert, counted from its own first, that has this token or a later one.
inline UNIEP_HD std::int64_t first_row_from(const PassView& v, int expert, std::int64_t number) {
  const RowOrigin* rows = v.row_origin + v.segment_begin[expert];
  const TokenOrder order = token_order(v);
  std::int64_t low = 0;
  std::int64_t high = v.tokens_per_expert[expert];
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (order.number(rows[middle].source, rows[middle].token) < number) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// The first row of an expert that has a token of the wave or a later one.
inline UNIEP_HD std::int64_t first_row_of_wave(const PassView& v, int expert, int wave) {
  return first_row_from(v, expert, first_token_of_wave(v, wave));
}

/// The tile of an expert that its first wave begins with; behind its last follow those before. That
/// which has tokens of the last wave, too, is the last. But in forward the last wave takes none
/// with tokens of others: where these follow in that tile, and none are ahead, they take it, as the
/// first.
inline UNIEP_HD std::int64_t first_wave_begin(const PassView& v, int expert) {
  const std::int64_t tile_m = v.schedule.tile_m;
  const std::int64_t row = first_row_of_wave(v, expert, 0);
  const std::int64_t begin = ceil_div(row, tile_m);
  if (v.pass == Pass::kBackward || row % tile_m == 0) return begin;
  const std::int64_t next = first_row_of_wave(v, expert, 1);
  const bool others_follow =
      next >= row && next < min_of<std::int64_t>(begin * tile_m, v.tokens_per_expert[expert]);
  const bool others_are_ahead =
      first_row_of_wave(v, expert, v.schedule.waves - 1) > row / tile_m * tile_m;
  return others_follow && !others_are_ahead ? begin - 1 : begin;
}

/// Whether the first host's tokens are so few that a tile has those of the last host, which are
/// ahead of them, and those of others behind.
inline UNIEP_HD bool seam_has_all(const PassView& v, int expert) {
  if (!has_seam(v.gathered_hosts, v.pass)) return false;
  const std::int64_t own = first_row_of_wave(v, expert, v.schedule.waves - 1);
  const std::int64_t others = first_row_of_wave(v, expert, 1);
  const bool others_follow = others >= own && others < v.tokens_per_expert[expert];
  return own > 0 && others_follow && (own - 1) / v.schedule.tile_m == others / v.schedule.tile_m;
}

/// How many of an expert's `count` tiles waves before this one take.
inline UNIEP_HD std::int64_t token_wave_begin(const PassView& v, int expert, std::int64_t count,
                                              int wave) {
  if (wave == 0 || wave == v.schedule.waves) return wave == 0 ? 0 : count;
  // Behind the seam, which then takes all tiles of the last host.
  if (wave == v.gathered_hosts && seam_has_all(v, expert)) ++wave;
  const std::int64_t row = first_row_of_wave(v, expert, wave);
  // Tokens come later than those before, and take the tile with them; but those of forward's last
  // wave are there from the beginning, and those behind the seam as it begins.
  const bool comes_later = v.pass == Pass::kBackward || wave < v.gathered_hosts;
  const bool has_rows = row < v.tokens_per_expert[expert];
  const std::int64_t tile = comes_later && has_rows
                                ? row / v.schedule.tile_m
                                : ceil_div<std::int64_t>(row, v.schedule.tile_m);
  const bool is_behind_end = first_token_of_wave(v, wave) <= first_token_of_wave(v, 0);
  return clamp_to<std::int64_t>(tile + (is_behind_end ? count : 0) - first_wave_begin(v, expert), 0,
                                count);
}

/// Which blocks of this rank's tokens each block of reduce has.
inline UNIEP_HD void set_token_waves(PassView& v) {
  v.reduced[0] = {0, static_cast<std::int32_t>(v.num_token_blocks())};
  if (!v.comes_in_waves()) return;
  for (int wave = 0; wave < v.schedule.waves; ++wave) {
    const auto [begin, end] = own_tokens_of_wave(v, wave);
    const std::int64_t block = v.schedule.token_block;
    const auto first = static_cast<std::int32_t>(ceil_div<std::int64_t>(begin, block));
    const auto last = static_cast<std::int32_t>(ceil_div<std::int64_t>(end, block));
    v.reduced[wave] = {first, last - first};
  }
}

}  // namespace uniep
