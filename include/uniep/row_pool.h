#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "uniep/communicator.h"
#include "uniep/macros.h"
#include "uniep/problem.h"

namespace uniep {

class RowPoolData;

struct RowPoolOptions {
  /// The size of the pool, which has as many whole pages as fit. 0: half of the memory that is free
  /// now; on the CPU, a rank's share of its host's.
  std::int64_t bytes = 0;
  /// The caller's memory for it, at a multiple of MemoryNeeds::alignment. Empty: uniep's own.
  std::span<std::byte> memory{};
};

/// Memory of one rank for what forward passes save, shared by layers of one shape and all their
/// outstanding forwards (LayerOptions::row_pool). It is cut into pages of Problem::row_align rows,
/// in which tokens that are kept (Save::kTokens) find room, too. A plan takes as many as its rows
/// and tokens need, and they go back when its backward is done: so memory follows what comes, and
/// not the capacity. Nothing of that waits for a device.
///
/// A handle; copies mean the same pool, which lives as long as anything that uses it.
class UNIEP_API RowPool {
 public:
  /// Makes a pool for layers of this `problem` (of hidden, intermediate, row_align, save and
  /// recompute_h; the rest may differ) of this member of a group. Not collective, and ranks' pools
  /// may differ in size. Throws Error(kInvalidArgument) if there is no room for a page, and
  /// Error(kUnsupported) if the backend has no pools.
  RowPool(const Problem& problem, const Communicator& communicator,
          const RowPoolOptions& options = {});
  RowPool(const RowPool&) = default;  // and so for moving: a handle is never empty
  RowPool& operator=(const RowPool&) = default;

  std::int64_t pages() const;
  std::int64_t page_bytes() const;  ///< of one
  std::int64_t bytes() const;       ///< of all of it
  std::int64_t free_pages() const;
  std::int64_t fewest_free_pages() const;  ///< since it was made: what a smaller one could save

  /// Library-internal.
  const std::shared_ptr<RowPoolData>& data() const { return data_; }

 private:
  std::shared_ptr<RowPoolData> data_;
};

}  // namespace uniep
