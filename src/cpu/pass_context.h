#pragma once

#include <memory>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "group/heap.h"
#include "layout/workspace.h"
#include "schedule/pass_view.h"
#include "uniep/layer.h"

namespace uniep::cpu {

/// The symmetric heaps of all ranks, by region.
struct PeerMemory {
  const std::vector<std::shared_ptr<Heap>>& heaps;
  const SymmetricLayout& layout;

  bf16* tokens(int rank) const { return at<bf16>(rank, layout.tokens); }
  float* probs(int rank) const { return at<float>(rank, layout.probs); }
  bf16* combine(int rank) const { return at<bf16>(rank, layout.combine); }
  float* dprobs(int rank) const { return at<float>(rank, layout.dprobs); }

 private:
  template <class T>
  T* at(int rank, std::int64_t offset) const {
    return reinterpret_cast<T*>(heaps[static_cast<std::size_t>(rank)]->data() + offset);
  }
};

/// What the stage routines of one pass read and write. Shapes as in layout/workspace.h; pointers
/// that the pass has no use for are null.
struct PassContext {
  const PassView& view;
  const Kernels& kernels;
  PeerMemory peers;

  const bf16* w1 = nullptr;
  const bf16* w2 = nullptr;

  bf16* dispatched = nullptr;  // where dispatch stores rows: x_rows or dy_rows
  bf16* x_rows = nullptr;      // forward writes, backward reads
  bf16* h = nullptr;           // likewise
  float* row_probs = nullptr;  // likewise
  bf16* a = nullptr;           // fc1 writes, fc2 reads; dfc2 writes, wgrad2 reads
  bf16* dy_rows = nullptr;
  bf16* dh = nullptr;
  float* dprob_groups = nullptr;

  bf16* token_out = nullptr;  // out or dx
  float* dprobs_out = nullptr;
  WeightGrad dw1{};
  WeightGrad dw2{};
};

/// Buffers of one worker, kept from task to task.
struct Scratch {
  GemmScratch packing;
  GemmScratch accumulators;  // fp32 results of the tile at hand
};

}  // namespace uniep::cpu
