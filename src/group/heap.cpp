#include "group/heap.h"

#include <sys/mman.h>

#include "base/check.h"

namespace uniep {

Heap::Heap(std::int64_t bytes, const char* remedy) : bytes_(bytes) {
  if (bytes == 0) return;
  const auto size = static_cast<std::size_t>(bytes);
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  require(p != MAP_FAILED, ErrorCode::kCapacity, "cannot allocate ", bytes, " bytes; ", remedy,
          " needs less");
  owner_ = std::shared_ptr<void>(p, [size](void* memory) { munmap(memory, size); });
  data_ = static_cast<std::byte*>(p);
}

}  // namespace uniep
