#pragma once

#include "cuda/device/sm90/combine.cuh"

// fc2, the GEMM with w2, with the push. Its data gradient is in dfc2.cuh.

namespace uniep::cuda {

/// y = a w2^T, pushed.
/// Maps: a = a (I, rows); b = w2 (I, H, El), box 64 x kN.
template <class Shape>
struct Fc2 : RowPush<Shape> {
  static constexpr Stage kStage = Stage::kFc2;
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kK;

  static __device__ __forceinline__ void load(const DeviceContext&, const StageMaps& maps,
                                              OperandSlot<Shape>& slot, std::uint64_t* full,
                                              const TileWork& work, int k_block) {
    const int k = k_block * kTileK;
    load_rows(maps, slot, full, work, work.first_row, k);
    ptx::tma_load(slot.b, maps.b, full, k, work.n, work.expert);
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps&,
                                              const TileWork& work) {
    push_rows<kStage>(sender, rows_to_push(sender, work), work);
  }
};

}  // namespace uniep::cuda
