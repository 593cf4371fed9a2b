#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/page_pool.h"
#include "uniep/row_pool.h"

namespace uniep {

/// What a RowPool holds; each backend has its own.
class RowPoolData {
 public:
  /// `start`: of PagePoolLayout(problem, pages).bytes, which the backend's own part keeps.
  RowPoolData(Backend of, const Problem& p, std::int64_t num_pages, std::byte* start)
      : backend(of), problem(p), layout(p, num_pages), pages(num_pages), base(start) {}
  virtual ~RowPoolData() = default;
  RowPoolData(const RowPoolData&) = delete;
  RowPoolData& operator=(const RowPoolData&) = delete;

  std::int64_t rows() const { return pages * problem.row_align; }
  PageStack stack() const { return page_stack(base, layout); }

  virtual std::int64_t free_pages() const = 0;
  virtual std::int64_t fewest_free_pages() const = 0;

  const Backend backend;
  const Problem problem;  // of which only the shape of a page matters
  const PagePoolLayout layout;
  const std::int64_t pages;
  std::byte* const base;
};

}  // namespace uniep
