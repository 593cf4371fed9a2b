#include "cpu/block_segments.h"
#include "cpu/stages.h"

namespace uniep::cpu {
namespace {

/// One tensor after another, so that neighbouring tokens travel as one.
template <Tensor t>
void add_tokens(const PassContext& ctx, std::span<const std::int32_t> tokens, std::int64_t width,
                RailBlock& block) {
  const int rank = ctx.view.rank;
  for (const std::int32_t token : tokens) {
    add_segment<t>(ctx, block, rank, token * width, width);
  }
}

}  // namespace

// Tokens of a piece that a host needs, to this rank's relay there.
void send(const PassContext& ctx, const Task& task, Scratch& scratch) {
  const PassView& v = ctx.view;
  const auto [begin, end] = host_items(v, task);
  const std::span tokens(v.across->sent_tokens + begin, v.across->sent_tokens + end);
  scratch.block.clear();
  add_tokens<Tensor::kTokens>(ctx, tokens, v.hidden, scratch.block);
  if (v.pass == Pass::kForward) {
    add_tokens<Tensor::kProbs>(ctx, tokens, v.slots, scratch.block);
  } else if (v.choice.drops_received) {
    add_tokens<Tensor::kXTokens>(ctx, tokens, v.hidden, scratch.block);
  }
}

}  // namespace uniep::cpu
