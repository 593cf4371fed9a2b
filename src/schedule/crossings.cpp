#include "schedule/crossings.h"

#include <algorithm>

namespace uniep {

Crossings::Crossings(const PassView& view, const RowBlocks& blocks) : view_(view) {
  pieces_.assign(static_cast<std::size_t>(view.across->first_token[view.num_ranks]), -1);
  pieces_there_.assign(static_cast<std::size_t>(view.layout.hosts * view.tokens), -1);
  blocks.for_each_row(
      [&](int source, std::int64_t token, int, std::int32_t expert, std::int32_t block) {
        note(source, token, view.layout.host_of(view.rank_of_expert(expert)), block);
      });
  count_tokens();
  list_sent_tokens();
}

void Crossings::count_tokens() {
  crossing_tokens.assign(static_cast<std::size_t>(view_.num_ranks * view_.num_pieces()), 0);
  for (int source = 0; source < view_.num_ranks; ++source) {
    for (std::int64_t token = 0; token < view_.tokens_of(source); ++token) {
      const std::int32_t of = piece(source, token);
      if (of >= 0) ++crossing_tokens[static_cast<std::size_t>(source * view_.num_pieces() + of)];
    }
  }
}

void Crossings::note(int source, std::int64_t token, int host, std::int32_t piece) {
  if (view_.layout.host_of(source) == host) return;
  const auto keep_first = [&](std::int32_t& kept) {
    kept = kept < 0 ? piece : std::min(kept, piece);
  };
  if (host == view_.layout.host_of(view_.rank)) {
    keep_first(pieces_[static_cast<std::size_t>(view_.across->first_token[source] + token)]);
  }
  if (source == view_.rank) {
    keep_first(pieces_there_[static_cast<std::size_t>(host * view_.tokens + token)]);
  }
}

void Crossings::list_sent_tokens() {
  sent_begin.push_back(0);
  for (int host = 0; host < view_.layout.hosts; ++host) {
    const auto first = pieces_there_.begin() + host * view_.tokens;
    std::vector<std::vector<std::int32_t>> by_piece(static_cast<std::size_t>(view_.num_pieces()));
    for (std::int64_t token = 0; token < view_.tokens; ++token) {
      if (first[token] < 0) continue;
      by_piece[static_cast<std::size_t>(first[token])].push_back(static_cast<std::int32_t>(token));
    }
    for (const auto& tokens : by_piece) {
      sent_tokens.insert(sent_tokens.end(), tokens.begin(), tokens.end());
      sent_begin.push_back(static_cast<std::int64_t>(sent_tokens.size()));
    }
  }
}

}  // namespace uniep
