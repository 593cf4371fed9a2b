#pragma once

#include "cuda/device/activation.cuh"
#include "cuda/device/gemm.cuh"

// How finishers walk their rows of a tile: 8 lanes to a row of 64 columns, 8 columns (16 bytes)
// each, so that every access of a warp to memory is of four whole lines.

namespace uniep::cuda {

/// What one lane does in one step.
struct RowVector {
  int row;              // of the consumer's 64
  int vector;           // of the chunk's 8
  std::int64_t at;      // row among all rows
  std::int64_t col;     // first of 8 columns of I
  std::int64_t offset;  // in a matrix [rows, I]
  float prob;
  bool stores;  // the columns exist, and the row is real or zeros that weight gradients read

  /// In a matrix [rows, 2I], gate half.
  __device__ __forceinline__ std::int64_t gate_offset() const { return 2 * offset - col; }
};

/// Whether any of the warp's gates needs the slow path of the sigmoid.
__device__ __forceinline__ bool any_unusual_gate(const float (&gates)[kVectorElements]) {
  float least = gates[0];
#pragma unroll
  for (int i = 1; i < kVectorElements; ++i) least = fminf(least, gates[i]);
  return __any_sync(0xffffffffu, is_unusual_gate(least)) != 0;
}

/// A gate and an up vector.
struct Halves {
  Vector gate, up;
};

__device__ __forceinline__ void store_vector(bf16* to, const Vector& v) {
  *reinterpret_cast<Vector*>(to) = v;
}
/// Of matrices [rows, 2I]: gate half, up half.
__device__ __forceinline__ void store_halves(bf16* gate, std::int64_t inter, const Halves& v) {
  store_vector(gate, v.gate);
  store_vector(gate + inter, v.up);
}
__device__ __forceinline__ Halves load_halves(const bf16* gate, std::int64_t inter) {
  return {__ldcs(reinterpret_cast<const Vector*>(gate)),
          __ldcs(reinterpret_cast<const Vector*>(gate + inter))};
}

template <class Shape>
class GatedRows {
 public:
  static constexpr int kLanesPerRow = kBoxCols / kVectorElements;
  static constexpr int kRowsPerStep = 32 / kLanesPerRow;
  static constexpr int kSteps = kConsumerRows / kRowsPerStep;  // of a chunk of 64 columns

  /// prob_of(row of the tile) is the row's probability.
  template <class ProbOf>
  __device__ __forceinline__ GatedRows(const Sender<Shape>& sender, const TileWork& work,
                                       ProbOf&& prob_of)
      : first_row_(work.first_row + kConsumerRows * sender.index),
        first_col_(work.n),
        lane_(sender.lane),
        inter_(sender.ctx.view.intermediate),
        // Rows up to the next multiple of 64 are zeros, and weight gradients read them.
        needed_(kConsumerRows * sender.index < work.rows) {
#pragma unroll
    for (int i = 0; i < kConsumerRows / 32; ++i) {
      probs_[i] = prob_of(kConsumerRows * sender.index + 32 * i + lane_);
    }
  }

  __device__ __forceinline__ RowVector at(int chunk, int step) const {
    RowVector v;
    v.row = step * kRowsPerStep + lane_ / kLanesPerRow;
    v.vector = lane_ % kLanesPerRow;
    v.col = first_col_ + chunk * kBoxCols + v.vector * kVectorElements;
    v.at = first_row_ + v.row;
    v.offset = v.at * inter_ + v.col;
    // Of the lane that has the row's; all rows of a step are in one half.
    const bool second = step * kRowsPerStep >= 32;
    v.prob = __shfl_sync(0xffffffffu, second ? probs_[1] : probs_[0], v.row % 32);
    v.stores = needed_ && v.col < inter_;
    return v;
  }

  __device__ __forceinline__ std::int64_t inter() const { return inter_; }

 private:
  const std::int64_t first_row_;
  const std::int64_t first_col_;
  const int lane_;
  const std::int64_t inter_;
  const bool needed_;
  float probs_[kConsumerRows / 32];  // of rows lane and lane + 32
};
static_assert(kConsumerRows == 64);

}  // namespace uniep::cuda
