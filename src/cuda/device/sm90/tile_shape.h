#pragma once

#include "graph/element.h"

namespace uniep::cuda {

// Shapes of GEMM tiles. The schedule's tile_m must be kTileM, its tile_n one of kTileColumns: there
// is a variant of every kernel for each.
inline constexpr int kTileM = 128;
/// What the tensor cores multiply.
inline constexpr Element kOperand = Element::kBf16;
inline constexpr int kOperandBytes = static_cast<int>(bytes_of(kOperand));
inline constexpr int kSwizzleBytes = 128;  // of a row of a box
inline constexpr int kTileK = kSwizzleBytes / kOperandBytes;
inline constexpr int kTileColumns[] = {128, 256};

inline constexpr int kConsumers = 2;                       // warpgroups that multiply
inline constexpr int kConsumerRows = kTileM / kConsumers;  // of the tile, each
inline constexpr int kBoxCols = 64;                        // of an output box: one swizzle row
inline constexpr int kBoxRows = 64;                        // of boxes but those of K-major weights

}  // namespace uniep::cuda
