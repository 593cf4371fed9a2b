#pragma once

#include <span>

#include "cpu/pass_context.h"

namespace uniep::cpu {

/// Adds to a block `count` elements for tensor `t` of rank `rank`, which lie in any host's memory
/// of that tensor from element `index` on. Neighbours become one segment.
template <Tensor t>
void add_segment(const PassContext& ctx, RailBlock& block, int rank, std::int64_t index,
                 std::span<const TypeOf<t>> elements) {
  const std::span<const std::byte> bytes = std::as_bytes(elements);
  const std::int64_t to = ctx.view.layout.host_of(rank) * ctx.layout.bytes + ctx.layout[t] +
                          index * static_cast<std::int64_t>(sizeof(TypeOf<t>));
  if (!block.segments.empty()) {
    RailBlock::Segment& last = block.segments.back();
    const auto size = static_cast<std::int64_t>(last.bytes.size());
    if (last.to + size == to && last.bytes.data() + size == bytes.data()) {
      last.bytes = {last.bytes.data(), last.bytes.size() + bytes.size()};
      return;
    }
  }
  block.segments.push_back({to, bytes});
}

/// Elements that this host's memory has of that rank's tensor.
template <Tensor t>
void add_segment(const PassContext& ctx, RailBlock& block, int rank, std::int64_t index,
                 std::int64_t count) {
  add_segment<t>(ctx, block, rank, index,
                 {ctx.peer(rank).get<t>() + index, static_cast<std::size_t>(count)});
}

}  // namespace uniep::cpu
