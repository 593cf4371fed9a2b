#pragma once

#include <cstdint>

#include "layout/page_shape.h"
#include "layout/workspace.h"

// What layers save, in pages (page_shape.h). A pool has some pages, of which a plan takes as many
// as its rows and tokens need. docs/memory.md says when pages are taken and given back, and why
// that is right. Rules here are those of both backends.

namespace uniep {

/// No page: of a place in the table of a plan that has none yet.
inline constexpr std::int32_t kNoPage = -1;

/// The memory of a pool: an array for each saved tensor, as if `pages` pages were rows that one
/// forward saves, then the stack of free pages.
struct PagePoolLayout {
  SavedLayout rows;
  std::int64_t tokens;  // where tensor `received` begins, if tokens are kept
  std::int64_t free;    // int32 [2]: pages on the stack, and the fewest that ever were
  std::int64_t stack;   // int32 [pages]
  std::int64_t bytes;

  PagePoolLayout(const Problem& p, std::int64_t pages, const Graph& graph = kLayerGraph)
      : rows(p, pages * p.row_align, pages * page_shape(p).tokens_beside_rows(), graph),
        tokens(rows[page_shape(p).tokens_apart ? Tensor::kH : Tensor::kReceived]) {
    detail::Ranges r;
    r.take_bytes(rows.bytes);
    free = r.take<std::int32_t>(2);
    stack = r.take<std::int32_t>(pages);
    bytes = r.bytes();
  }
};

/// Bytes of one page, what all pages share aside.
inline std::int64_t page_bytes(const Problem& p, const Graph& graph = kLayerGraph) {
  Extents extents = extents_of(p, 1, p.row_align);
  extents[Extent::kReceived] = page_shape(p).tokens_beside_rows();
  std::int64_t bytes = sizeof(std::int32_t);
  for (int i = 0; i < graph.num_tensors; ++i) {
    const TensorRow& t = graph.tensors[i];
    if (is_saved(t, choice_of(p))) bytes += elements_of(t, extents) * bytes_of(t.element);
  }
  return bytes;
}

/// The most pages that a pool of so many bytes has.
inline std::int64_t pages_in(const Problem& p, std::int64_t bytes) {
  std::int64_t pages = min_of(bytes / page_bytes(p), page_shape(p).most_pages());
  while (pages > 0 && PagePoolLayout(p, pages).bytes > bytes) --pages;
  return pages > 0 ? pages : 0;
}

/// Bytes of a pool with so many pages, or a few more: each of its arrays is rounded up.
inline UNIEP_HD std::int64_t bytes_for_pages(std::int64_t bytes_of_page, std::int64_t pages) {
  return pages * bytes_of_page + 256 * (kMaxTensors + 2);
}

/// A tensor that may be saved, but is neither of rows nor of tokens that came, so that pages cannot
/// hold it; null: there is none.
constexpr const TensorRow* unpaged_tensor(const Graph& graph) {
  for (int i = 0; i < graph.num_tensors; ++i) {
    const TensorRow& t = graph.tensors[i];
    if (t.lifetime != Lifetime::kSaved || t.tensor == Tensor::kReceived) continue;
    if (t.shape[0] != Extent::kRows) return &t;
  }
  return nullptr;
}
static_assert(unpaged_tensor(kLayerGraph) == nullptr);

/// The stack of free pages, in the pool's memory.
struct PageStack {
  std::int32_t* free = nullptr;  // [2]
  std::int32_t* pages = nullptr;

  /// Page number `group` of a plan that takes pages where `free_before` are free: the topmost
  /// first, so that memory that was written lately is written again.
  UNIEP_HD std::int32_t taken(std::int32_t free_before, std::int64_t group) const {
    return pages[free_before - 1 - group];
  }
  /// Where the page of that group goes when they are given back.
  UNIEP_HD std::int32_t& given_back(std::int32_t free_before, std::int64_t group) const {
    return pages[free_before + group];
  }
};

inline PageStack page_stack(std::byte* base, const PagePoolLayout& layout) {
  return {reinterpret_cast<std::int32_t*>(base + layout.free),
          reinterpret_cast<std::int32_t*>(base + layout.stack)};
}

/// All pages are free, page 0 on top.
inline void fill_page_stack(PageStack stack, std::int64_t pages) {
  const auto count = static_cast<std::int32_t>(pages);
  for (std::int32_t i = 0; i < count; ++i) stack.pages[i] = count - 1 - i;
  stack.free[0] = stack.free[1] = count;
}

/// How full a rank's pool is, as ranks tell one another ahead of a plan.
struct PageCount {
  std::int64_t pages;
  std::int64_t free;
};

}  // namespace uniep
