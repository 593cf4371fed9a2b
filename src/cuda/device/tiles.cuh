#pragma once

#include <cstdint>

#include "cuda/device/faults.cuh"
#include "cuda/device/tile_shape.h"
#include "cuda/ptx/mbarrier.cuh"
#include "uniep/stage.h"

namespace uniep::cuda {

inline constexpr int kPipelineStages = 4;
inline constexpr int kConsumers = 2;  // warpgroups, 64 rows each
inline constexpr int kConsumerWarps = 4 * kConsumers;
inline constexpr int kThreads = 128 * (1 + kConsumers);
inline constexpr int kBoxCols = 64;                  // columns of an output box: one swizzle row
inline constexpr int kBoxBytes = 64 * kBoxCols * 2;  // of an operand box of 64 x 64

/// Registers per thread after the roles have parted: 128 (56 + 2 224) <= 65536 per SM.
inline constexpr int kProducerRegisters = 56;
inline constexpr int kConsumerRegisters = 224;

/// A warp's output staging. Pushed rows are bytes of 128 columns, one after another, 16 bytes apart
/// so that the 8 rows of a matrix lie in different banks. Tensor boxes are 16 rows of 64 columns,
/// swizzled.
inline constexpr int kPushCols = 128;
inline constexpr int kPushRowBytes = kPushCols * 2 + 16;
inline constexpr int kOutBoxBytes = kWarpRows * kBoxCols * 2;

/// One tile as the scheduler warp hands it to the loader and the consumers.
struct TileWork {
  int valid;  // 0: no more tiles
  int expert;
  int first_row;  // of the tile, among the rows; wgrad: of the expert's segment
  int rows;       // real rows in it
  int m;          // wgrad: first row of the output tile
  int n;          // first column of the output tile
  int k_blocks;
  int counter;  // index of the counter that the finished tile advances
  TaskName task;
};

inline constexpr int kWorkSlots = 4;
/// More than the tiles by which one consumer warp can be ahead of another: the work ring holds them
/// to kWorkSlots, and a tile's stores are looked after during the next one.
inline constexpr int kTilesUnderWay = 2 * kWorkSlots;

struct GemmShared {
  alignas(1024) std::uint8_t a[kPipelineStages][kTileM * kTileK * 2];
  alignas(1024) std::uint8_t b[kPipelineStages][kTileN * kTileK * 2];
  union alignas(1024) {
    std::uint8_t boxes[kConsumerWarps][2][kOutBoxBytes];
    std::uint8_t pushes[kConsumerWarps][kWarpRows * kPushRowBytes];
  } out;
  std::uint64_t full[kPipelineStages];
  std::uint64_t empty[kPipelineStages];
  std::uint64_t work_full[kWorkSlots];
  std::uint64_t work_empty[kWorkSlots];
  TileWork work[kWorkSlots];
  int warps_done[kTilesUnderWay];  // consumer warps whose part of a tile has landed, by its number
};
static_assert(sizeof(GemmShared) <= 232448, "more shared memory than a CTA can have on sm_90");

using StageRing = ptx::RingPosition<kPipelineStages>;
using WorkRing = ptx::RingPosition<kWorkSlots>;

}  // namespace uniep::cuda
