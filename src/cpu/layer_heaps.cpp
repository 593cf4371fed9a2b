#include "cpu/layer_heaps.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include "base/check.h"

namespace uniep::cpu {

LayerHeaps::LayerHeaps(CpuCommunicator& comm, const Problem& problem, const LayerMemory& memory)
    : comm_(comm),
      layout_(problem, comm.size(), kLayerGraph, comm.group().layout().hosts),
      own_(make_own(memory)) {}

std::shared_ptr<Heap> LayerHeaps::make_own(const LayerMemory& memory) const {
  const int hosts = comm_.group().layout().hosts;
  if (memory.symmetric.empty()) return comm_.group().allocate(comm_.rank(), hosts * layout_.bytes);
  require(hosts == 1, ErrorCode::kUnsupported, "memory.symmetric is given in a group of ", hosts,
          " hosts; none is accepted there, or a group on one host");
  require(!memory.peers.empty() || comm_.size() == 1, ErrorCode::kUnsupported,
          "memory.symmetric is given without memory.peers, and ranks on the CPU cannot map each "
          "other's; with the peers it is accepted, or none, and in a group of one");
  const auto bytes = static_cast<std::size_t>(layout_.bytes);
  const auto first_counter = static_cast<std::size_t>(layout_.first_counter);
  std::ranges::fill(memory.symmetric.first(bytes).subspan(first_counter), std::byte{0});
  const auto released = [release = memory.release](std::byte*) {
    if (release) release();
  };
  std::byte* const data = memory.symmetric.data();
  return std::make_shared<Heap>(data, layout_.bytes, std::shared_ptr<std::byte>(data, released));
}

void LayerHeaps::map(const LayerMemory& memory, int number, int timeout_ms) {
  std::vector<std::shared_ptr<Heap>> heaps = of_this_host(memory, timeout_ms);
  if (comm_.group().layout().hosts > 1) return stand_in_for_rail(heaps, number);
  of_ranks_ = std::move(heaps);
}

std::vector<std::shared_ptr<Heap>> LayerHeaps::of_this_host(const LayerMemory& memory,
                                                            int timeout_ms) const {
  if (memory.peers.empty()) return comm_.group().share(comm_.rank(), own_, timeout_ms);
  std::vector<std::shared_ptr<Heap>> heaps;
  for (std::byte* peer : memory.peers) {
    heaps.push_back(std::make_shared<Heap>(peer, own_->bytes(), nullptr));
  }
  heaps[static_cast<std::size_t>(comm_.rank())] = own_;
  return heaps;
}

void LayerHeaps::stand_in_for_rail(const std::vector<std::shared_ptr<Heap>>& heaps, int number) {
  const RankLayout& layout = comm_.group().layout();
  const int own_host = layout.host_of(comm_.rank());
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const auto& heap = heaps[static_cast<std::size_t>(layout.relay(rank, own_host))];
    of_ranks_.push_back(std::make_shared<Heap>(heap->data() + layout.host_of(rank) * layout_.bytes,
                                               layout_.bytes, heap));
  }
  RailMemory memory;
  for (int local = 0; local < layout.local_ranks; ++local) {
    const Heap& heap = *heaps[static_cast<std::size_t>(layout.rank_at(own_host, local))];
    memory.ranks.emplace_back(heap.data(), static_cast<std::size_t>(heap.bytes()));
  }
  memory.owner = std::make_shared<std::vector<std::shared_ptr<Heap>>>(of_ranks_);
  attached_.emplace(comm_.group().rail(comm_.rank()), static_cast<std::uint64_t>(number),
                    std::move(memory));
}

}  // namespace uniep::cpu
