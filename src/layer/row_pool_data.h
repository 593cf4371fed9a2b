#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "layout/page_pool.h"
#include "plan/page_pool.h"
#include "uniep/row_pool.h"

namespace uniep {

/// What a RowPool holds.
class RowPoolData {
 public:
  /// `memory` owns `base`, PagePoolLayout(problem, pages).bytes.
  RowPoolData(const Problem& p, std::int64_t num_pages, std::shared_ptr<void> memory,
              std::byte* start)
      : problem(p),
        layout(p, num_pages),
        pages(num_pages),
        base(start),
        free(std::make_shared<PagePool>(page_stack(start, layout), num_pages, std::move(memory))) {}

  const Problem problem;  // of which only the shape of a page matters
  const PagePoolLayout layout;
  const std::int64_t pages;
  std::byte* const base;
  const std::shared_ptr<PagePool> free;
};

}  // namespace uniep
