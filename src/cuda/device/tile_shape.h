#pragma once

namespace uniep::cuda {

// Shape of a GEMM tile and of the CTA that computes it. The schedule's tile_m and tile_n must be
// these.
inline constexpr int kTileM = 128;
inline constexpr int kTileN = 256;
inline constexpr int kTileK = 64;     // one 128-byte swizzle row of bf16
inline constexpr int kWarpRows = 16;  // of the tile, per consumer warp

}  // namespace uniep::cuda
