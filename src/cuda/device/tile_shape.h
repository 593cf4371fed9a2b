#pragma once

namespace uniep::cuda {

// Shapes of GEMM tiles. The schedule's tile_m must be kTileM, its tile_n one of kTileColumns: there
// is a variant of every kernel for each.
inline constexpr int kTileM = 128;
inline constexpr int kTileK = 64;  // one 128-byte swizzle row of bf16
inline constexpr int kTileColumns[] = {128, 256};

inline constexpr int kConsumers = 2;                       // warpgroups that multiply
inline constexpr int kConsumerRows = kTileM / kConsumers;  // of the tile, each
inline constexpr int kBoxCols = 64;                        // of an output box: one swizzle row

}  // namespace uniep::cuda
