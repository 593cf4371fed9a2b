#pragma once

#include <cstdint>

#include "schedule/pass_view.h"

// What a dispatching warp remembers: the pulls that it has read, which chunk of them it has got to,
// and whose rows it has yet to signal.

namespace uniep::cuda {

inline constexpr int kNoRow = -1;

/// Up to 32 pulls of one task, one in each lane.
struct PullBatch {
  Pull pull{};           // of expand: its token is a place of `received`
  int keep_at = kNoRow;  // the token's place there, if this pull stores it
  int pulls = 0;
  int tile = 0;  // Task::tile
  Stage stage = Stage::kDispatch;
  std::int64_t task = 0;
  // In a ring of rows, where tasks are of rows of one expert:
  int expert = 0;
  int last_row = kNoRow;  // of the expert
};

/// How far loads or stores have got: a buffer, and a chunk of a pull, which is numbered from the
/// current batch's first and may be of the upcoming one. Counted up, since a division takes as long
/// as many a chunk.
struct ChunkPosition {
  int buffer = 0;
  int parity = 0;
  int pull = 0;
  int chunk = 0;

  __device__ __forceinline__ void advance(int buffers, int chunks) {
    if (++buffer == buffers) {
      buffer = 0;
      parity ^= 1;
    }
    if (++chunk == chunks) {
      chunk = 0;
      ++pull;
    }
  }
};

/// The lane's rows of a group of chunks that are signalled together: of those that are a pull's
/// last.
struct ChunkRows {
  static constexpr int kChunks = 4;

  int row[kChunks] = {kNoRow, kNoRow, kNoRow, kNoRow};
  int tile = 0;  // Task::tile of their task
  Stage stage = Stage::kDispatch;

  static __device__ __forceinline__ ChunkRows none_of(const PullBatch& batch) {
    return {.tile = batch.tile, .stage = batch.stage};
  }
  __device__ __forceinline__ void put(int at, int value) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (i == at) row[i] = value;
    }
  }
  __device__ __forceinline__ int get(int at) const {
    int value = kNoRow;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (i == at) value = row[i];
    }
    return value;
  }
};

}  // namespace uniep::cuda
