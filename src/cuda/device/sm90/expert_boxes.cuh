#pragma once

#include "cuda/device/sm90/tiles.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/stage_maps.h"

// Boxes of experts' matrices, through whichever map has them: one of all matrices, or where they
// lie apart one of each (cuda/expert_maps.h).

namespace uniep::cuda {

/// To be called by a thread that uses maps in memory, once for each tile: what wrote them did so by
/// ordinary stores.
__device__ __forceinline__ void acquire_maps(const ExpertMapTable& table, int expert) {
  if (table.maps == nullptr) return;
#pragma unroll 1
  for (int part = 0; part < table.parts; ++part) {
    ptx::acquire_tensor_map(table.maps + expert * table.parts + part);
  }
}

/// A map, and where in it the matrix is.
struct MatrixBox {
  const CUtensorMap* map;
  int part;
  int expert;
};
__device__ __forceinline__ MatrixBox matrix_box(const CUtensorMap& all, const ExpertMapTable& table,
                                                int expert, int part) {
  if (table.maps == nullptr) return {&all, part, expert};
  return {table.maps + expert * table.parts + part, 0, 0};
}

/// The map that has a row of an expert, if matrices lie apart, and which row of it that is; which
/// column, if they are [in, out].
struct RowPlace {
  const CUtensorMap* map;
  int row;
};
__device__ __forceinline__ RowPlace row_place(const ExpertMapTable& table, int expert, int row) {
  const int part = row < table.rows ? 0 : table.parts - 1;
  return {table.maps + expert * table.parts + part, row - part * table.rows};
}

/// f(map, rows before it, its first row in the map, expert in the map) for the boxes that make up
/// 64 rows of an expert from `row` on, which may begin in the gate's and end in those of up.
template <class F>
__device__ __forceinline__ void for_each_row_box(const CUtensorMap& all,
                                                 const ExpertMapTable& table, int expert, int row,
                                                 F&& f) {
  if (table.maps == nullptr) return f(all, 0, row, expert);
#pragma unroll 1
  for (int before = 0; before < kBoxRows; before += table.box_rows) {
    const RowPlace place = row_place(table, expert, row + before);
    f(*place.map, before, place.row, 0);
  }
}

}  // namespace uniep::cuda
