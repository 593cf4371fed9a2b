#include "uniep/row_pool.h"

#include "base/check.h"
#include "base/memory_info.h"
#include "cpu/row_pool.h"
#include "group/cpu_group.h"
#include "layer/row_pool_data.h"
#ifdef UNIEP_HAS_CUDA
#include "cuda/row_pool.h"
#endif

namespace uniep {
namespace {

std::int64_t free_bytes(const Communicator& communicator) {
#ifdef UNIEP_HAS_CUDA
  if (communicator.backend() == Backend::kCuda) return cuda::free_device_bytes(communicator);
#endif
  const auto& own = dynamic_cast<const CpuCommunicator&>(*communicator.impl());
  return static_cast<std::int64_t>(available_memory()) / own.group().ranks_of_machine();
}

/// Bytes that the options ask for.
std::int64_t wanted_bytes(const RowPoolOptions& options, const Communicator& communicator) {
  require(options.bytes >= 0, ErrorCode::kInvalidArgument, "options.bytes is ", options.bytes,
          "; 1 or more is accepted, and 0 for half of the free memory");
  const auto given = static_cast<std::int64_t>(options.memory.size());
  if (options.bytes != 0) {
    require(given == 0 || given >= options.bytes, ErrorCode::kInvalidArgument,
            "options.memory has ", given, " bytes; options.bytes=", options.bytes,
            " or more are accepted");
    return options.bytes;
  }
  return given != 0 ? given : free_bytes(communicator) / 2;
}

void check_start(std::span<const std::byte> memory, Backend backend) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  const auto alignment =
      static_cast<std::uintptr_t>(backend == Backend::kCpu ? kCpuAlignment : kDeviceAlignment);
  require(address % alignment == 0, ErrorCode::kInvalidArgument,
          "options.memory starts at address ", address, "; a multiple of ", alignment,
          " is accepted");
}

std::shared_ptr<RowPoolData> make_pool(const Problem& p, const Communicator& communicator,
                                       std::int64_t bytes, std::span<std::byte> memory) {
#ifdef UNIEP_HAS_CUDA
  if (communicator.backend() == Backend::kCuda) {
    return cuda::make_row_pool(p, communicator, bytes, memory);
  }
#endif
  (void)communicator;
  return cpu::make_row_pool(p, bytes, memory);
}

}  // namespace

RowPool::RowPool(const Problem& problem, const Communicator& communicator,
                 const RowPoolOptions& options) {
  validate(problem, communicator.size());
  const std::int64_t bytes = wanted_bytes(options, communicator);
  require(pages_in(problem, bytes) > 0, ErrorCode::kInvalidArgument, "a row pool of ", bytes,
          " bytes has no page; ", PagePoolLayout(problem, 1).bytes, " or more are accepted");
  check_start(options.memory, communicator.backend());
  data_ = make_pool(problem, communicator, bytes, options.memory);
}

std::int64_t RowPool::pages() const { return data_->pages; }
std::int64_t RowPool::page_bytes() const { return uniep::page_bytes(data_->problem); }
std::int64_t RowPool::bytes() const { return data_->layout.bytes; }
std::int64_t RowPool::free_pages() const { return data_->free_pages(); }
std::int64_t RowPool::fewest_free_pages() const { return data_->fewest_free_pages(); }

}  // namespace uniep
