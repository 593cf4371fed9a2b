#include "uniep/row_pool.h"

#include "base/check.h"
#include "base/memory_info.h"
#include "group/communicator_impl.h"
#include "group/heap.h"
#include "layer/callers_memory.h"
#include "layer/row_pool_data.h"

namespace uniep {
namespace {

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
  if (given != 0) return given;
  return static_cast<std::int64_t>(available_memory()) / 2 / communicator.size();
}

std::shared_ptr<RowPoolData> make_pool(const Problem& p, std::int64_t bytes,
                                       std::span<std::byte> given) {
  const std::int64_t pages = pages_in(p, bytes);
  require(pages > 0, ErrorCode::kInvalidArgument, "a row pool of ", bytes, " bytes has no page; ",
          PagePoolLayout(p, 1).bytes, " or more are accepted");
  if (!given.empty()) {
    const auto address = reinterpret_cast<std::uintptr_t>(given.data());
    require(address % kHostAlignment == 0, ErrorCode::kInvalidArgument,
            "options.memory starts at address ", address, "; a multiple of ", kHostAlignment,
            " is accepted");
    return std::make_shared<RowPoolData>(p, pages, nullptr, given.data());
  }
  const auto heap = std::make_shared<Heap>(PagePoolLayout(p, pages).bytes);
  return std::make_shared<RowPoolData>(p, pages, heap, heap->data());
}

}  // namespace

RowPool::RowPool(const Problem& problem, const Communicator& communicator,
                 const RowPoolOptions& options) {
  require(communicator.impl() != nullptr, ErrorCode::kInvalidArgument,
          "the communicator was moved to another one; that one is accepted");
  validate(problem, communicator.size());
  require(communicator.backend() == Backend::kCpu, ErrorCode::kUnsupported,
          "row pools are there on the CPU only so far; with the cuda backend, StepMemory of as "
          "many rows as come (exact_rows in Python) keeps what comes, and waits for the count");
  const TensorRow* unpaged = unpaged_tensor(problem);
  require(unpaged == nullptr, ErrorCode::kUnsupported, "a layer of save=", name(problem.save),
          " keeps ", unpaged == nullptr ? "" : unpaged->name,
          ", which is no tensor of rows; with a row pool, save=rows and save=none are accepted");
  data_ = make_pool(problem, wanted_bytes(options, communicator), options.memory);
}

std::int64_t RowPool::pages() const { return data_->pages; }
std::int64_t RowPool::page_bytes() const { return uniep::page_bytes(data_->problem); }
std::int64_t RowPool::bytes() const { return data_->layout.bytes; }
std::int64_t RowPool::free_pages() const { return data_->free->count().free; }
std::int64_t RowPool::fewest_free_pages() const { return data_->free->fewest_free(); }

}  // namespace uniep
