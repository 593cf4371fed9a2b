#include "cpu/row_pool.h"

namespace uniep::cpu {

std::shared_ptr<RowPoolData> make_row_pool(const Problem& problem, std::int64_t bytes,
                                           std::span<std::byte> memory) {
  const std::int64_t pages = pages_in(problem, bytes);
  const std::int64_t needed = PagePoolLayout(problem, pages).bytes;
  const Heap heap = memory.empty() ? Heap(needed, "a pool of smaller options.bytes")
                                   : Heap(memory.data(), needed, nullptr);
  return std::make_shared<CpuRowPool>(problem, pages, heap);
}

}  // namespace uniep::cpu
