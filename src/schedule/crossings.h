#pragma once

#include <vector>

#include "schedule/row_blocks.h"

namespace uniep {

/// In which pieces tokens cross between hosts. A token goes to a host with the piece of the first
/// block that needs it on any of that host's ranks: blocks are numbered alike on all ranks, so that
/// what is needed first comes first.
class Crossings {
 public:
  /// `view` outlives this.
  Crossings(const PassView& view, const RowBlocks& blocks);

  /// The piece that brings a token of another host to this one; -1: none does.
  std::int32_t piece(int source, std::int64_t token) const {
    return pieces_[static_cast<std::size_t>(view_.across->first_token[source] + token)];
  }

  /// Tokens that a rank of another host sends here with each piece: [ranks, pieces].
  std::vector<std::int32_t> crossing_tokens;
  /// This rank's tokens that other hosts need, by host and piece; and where those of a host and
  /// piece begin: [hosts * pieces + 1].
  std::vector<std::int32_t> sent_tokens;
  std::vector<std::int64_t> sent_begin;

 private:
  void note(int source, std::int64_t token, int host, std::int32_t piece);
  void count_tokens();
  void list_sent_tokens();

  const PassView& view_;
  std::vector<std::int32_t> pieces_;        // [tokens of all ranks]: on this host
  std::vector<std::int32_t> pieces_there_;  // [hosts, own tokens]
};

}  // namespace uniep
