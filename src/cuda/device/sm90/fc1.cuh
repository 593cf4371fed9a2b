#pragma once

#include "cuda/device/sm90/activation_rows.cuh"
#include "cuda/device/sm90/biases.cuh"
#include "cuda/device/sm90/combine.cuh"
#include "cuda/device/sm90/gemm.cuh"
#include "cuda/device/warp.cuh"

// The GEMMs with w1: fc1 with the activation in its epilogue, refc1 without it, and fc1's data
// gradient dfc1 with the push.

namespace uniep::cuda {

/// h = x w1^T and a = p f(h). The tile's columns are kN / 2 of the gate half, then the same of the
/// up half, so a thread holds both halves of each of its elements; without a gate they are kN
/// neighbours.
/// Maps: a = x_rows (H, rows); b = w1 (H, I, 2, El), box 64 x kN / 2, or of each matrix [in, out]
/// (I, H), box 64 x 64; out0 = h (I, 2, rows), out1 = a (I, rows), boxes 64 x 64.
/// kGeneral: of any experts, as the view says; else of SwiGLU with probabilities ahead of fc2,
/// without biases, and of weights [out, in].
template <class Shape, bool kGeneral = false>
struct Fc1 : EmptyEpilogueSlots<Shape, (OutputRing<Shape>::borrows(3 * Shape::kN / 2 / kBoxCols))> {
  static constexpr Stage kStage = Stage::kFc1;
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kK;
  static constexpr bool kReadsAnyOrder = kGeneral;
  static constexpr int kHalf = Shape::kN / 2;
  static constexpr int kChunks = kHalf / kBoxCols;
  using Columns = ColumnsOfH<Shape, kGeneral>;
  static constexpr bool kBorrows = Fc1::kEpilogueSlots > 0;

  static __device__ __forceinline__ void load(const DeviceContext& ctx, const StageMaps& maps,
                                              OperandSlot<Shape>& slot, std::uint64_t* full,
                                              const TileWork& work, int first_token, int k_block) {
    const int k = k_block * kTileK;
    load_rows<Tensor::kXRows>(ctx, maps, slot, full, work, first_token, k);
    if (k_block == 0) acquire_maps(maps.experts, work.expert);
    const Columns columns(ctx.view, work);
    const bool in_out = reads_in_out<Fc1>(ctx, work);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const MatrixBox box = matrix_box(maps.b, maps.experts, work.expert, columns.half(part));
      std::uint8_t* to = slot.b + part * kHalf * kTileK * kOperandBytes;
      const int col = columns.first(part);
      if (!in_out) {
        ptx::tma_load(to, *box.map, full, k, col, box.part, box.expert);
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < kHalf / 64; ++i) {
        ptx::tma_load(to + i * kBoxBytes, *box.map, full, col + 64 * i, k, box.part, box.expert);
      }
    }
  }

  /// A thread's two rows, as in RowProbs.
  struct Early {
    RowOrigin origin[2]{};
    RowProbs probs{};
    [[no_unique_address]] std::conditional_t<kGeneral, BiasOfH<Columns>, Nothing> bias;
  };

  static __device__ __forceinline__ int row_of(const Consumer<Shape>& consumer, int i) {
    return consumer.first_row() + consumer.lane() / 4 + 8 * i;
  }

  static __device__ __forceinline__ Early prepare(const Consumer<Shape>& consumer,
                                                  const TileWork& work) {
    Early early{.bias = {consumer.ctx, work}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of(consumer, i);
      if (row < work.rows) early.origin[i] = consumer.ctx.view.row_origin[work.plan_row + row];
    }
    return early;
  }

  /// The probabilities come from the rows' own ranks, whose tokens dispatch has seen published. An
  /// address that was loaded itself stops a thread until it is there, hence not before the main
  /// loop, which hides the way.
  static __device__ __forceinline__ void proceed(const Consumer<Shape>& consumer,
                                                 const TileWork& work, Early& early) {
    const DeviceContext& ctx = consumer.ctx;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row_of(consumer, i) >= work.rows) continue;
      const RowOrigin& origin = early.origin[i];
      const std::int64_t slot = std::int64_t{origin.token} * ctx.view.slots + origin.slot;
      early.probs.of[i] = __ldcg(ctx.peer(origin.source).get<Tensor::kProbs>() + slot);
    }
  }

  /// Every column tile has fetched the probabilities, the first keeps them for backward.
  static __device__ __forceinline__ void keep_probs(const Consumer<Shape>& consumer,
                                                    const TileWork& work, const RowProbs& probs) {
    if (work.n != 0 || consumer.lane() % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of(consumer, i);
      if (row >= work.rows) continue;
      consumer.ctx.template get<Tensor::kRowProbs>()[work.saved_row + row] = probs.of[i];
    }
  }

  /// Boxes of h, two for each 64 columns of a part, and of a, as many as it has.
  static __device__ __forceinline__ int boxes(const Columns& columns) {
    return (columns.gated ? 3 : 4) * kChunks;
  }

  /// Boxes: both parts of each 64 columns, then a of each. Packed, h leaves registers for many
  /// elements of a at once.
  static __device__ __forceinline__ void finish(Consumer<Shape>& consumer,
                                                const float (&acc)[Shape::kAccumulators],
                                                const TileWork& work, const Early& early) {
    keep_probs(consumer, work, early.probs);
    const Columns columns(consumer.ctx.view, work);
    std::uint32_t gate[kChunks][kPairs], up[kChunks][kPairs];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int j = chunk * 2 * kPairs + 2 * i;
        gate[chunk][i] = pack_pair(acc[j], acc[j + 1]);
        up[chunk][i] = pack_pair(acc[kHalf / 2 + j], acc[kHalf / 2 + j + 1]);
      }
      if constexpr (kGeneral) {
        early.bias.add_to(consumer.ctx.view, 0, chunk, gate[chunk]);
        early.bias.add_to(consumer.ctx.view, 1, chunk, up[chunk]);
      }
    }
    const int count = boxes(columns);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      consumer.write_box(OutputRing<Shape>::box_of(2 * chunk, count), gate[chunk]);
      consumer.write_box(OutputRing<Shape>::box_of(2 * chunk + 1, count), up[chunk]);
    }
    const RowProbs factors = factors_of<kGeneral, Pass::kForward>(consumer.ctx.view, early.probs);
    with_activation<kGeneral>(consumer.ctx.view.activation, [&]<Activation kActivation>() {
      activate_all<kActivation>(consumer, gate, up, factors);
    });
    if (kBorrows) consumer.ring.advance();
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps& maps,
                                              const TileWork& work) {
    const int row = work.first_row + kConsumerRows * sender.index;
    const int row_of_h = work.saved_row + kConsumerRows * sender.index;
    const bool keeps_h = sender.ctx.template get<Tensor::kH>() != nullptr;
    const Columns columns(sender.ctx.view, work);
    sender.send_boxes(boxes(columns), [&](int i, const std::uint8_t* box) {
      if (!has_rows(work, sender.index)) return;
      if (i < 2 * kChunks) {
        const int col = columns.first(i % 2) + i / 2 * kBoxCols;
        if (keeps_h) ptx::tma_store(maps.out0, box, col, columns.half(i % 2), row_of_h);
      } else {
        ptx::tma_store(maps.out1, box, work.n + (i - 2 * kChunks) * kBoxCols, row, 0);
      }
    });
    if (sender.lane == 0) sender.template signal_tile<kStage>(work);
  }

 private:
  /// a of all chunks, and into its boxes.
  template <Activation kActivation>
  static __device__ __forceinline__ void activate_all(Consumer<Shape>& consumer,
                                                      const std::uint32_t (&gate)[kChunks][kPairs],
                                                      const std::uint32_t (&up)[kChunks][kPairs],
                                                      const RowProbs& factors) {
    bool unusual = false;
    if constexpr (has_sigmoid(kActivation)) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        unusual = unusual || has_unusual_gate<kActivation>(gate[chunk]);
        if (!is_gated(kActivation)) unusual = unusual || has_unusual_gate<kActivation>(up[chunk]);
      }
      unusual = __any_sync(kWholeWarp, unusual);
    }
    constexpr int kCount = (is_gated(kActivation) ? 3 : 4) * kChunks;
#pragma unroll
    for (int chunk = 0; chunk < kCount - 2 * kChunks; ++chunk) {
      const auto& of_chunk = chunk < kChunks ? gate[chunk % kChunks] : up[chunk % kChunks];
      std::uint32_t a[kPairs];
      if constexpr (!has_sigmoid(kActivation)) {
        activate_one_by_one<kActivation>(of_chunk, up[chunk % kChunks], factors, consumer.ctx.erf,
                                         a);
      } else if (unusual) {
        activate<kActivation, false>(of_chunk, up[chunk % kChunks], factors, consumer.ctx.limits,
                                     a);
      } else {
        activate<kActivation, true>(of_chunk, up[chunk % kChunks], factors, consumer.ctx.limits, a);
      }
      consumer.write_box(OutputRing<Shape>::box_of(2 * kChunks + chunk, kCount), a);
    }
  }

  /// Pair after pair, or element after element: side by side, they would take registers that the
  /// products of this kernel need.
  template <Activation kActivation>
  static __device__ __forceinline__ void activate_one_by_one(const std::uint32_t (&gate)[kPairs],
                                                             const std::uint32_t (&up)[kPairs],
                                                             const RowProbs& factors,
                                                             const ErfCoefficients& erf,
                                                             std::uint32_t (&a)[kPairs]) {
    constexpr int kAtOnce = kActivation == Activation::kSwigluSoftcapped ? 1 : 2;
#pragma unroll
    for (std::uint32_t& pair : a) pair = 0;
#pragma unroll 1
    for (int i = 0; i < kPairs; ++i) {
      const float factor = pick(factors.of, i % 2);
      const std::uint32_t g = pick(gate, i), u = pick(up, i);
      float of[2] = {};
#pragma unroll kAtOnce
      for (int half = 0; half < 2; ++half) {
        const ValueSlope v = gate_at<kActivation, DeviceMath>(low_of(g >> 16 * half), {erf});
        put(of, half, factor * product_of<kActivation>(v, low_of(u >> 16 * half), {}));
      }
      put(a, i, pack_pair(of[0], of[1]));
    }
  }

  template <Activation kActivation, bool kUsual>
  static __device__ __forceinline__ void activate(const std::uint32_t (&gate)[kPairs],
                                                  const std::uint32_t (&up)[kPairs],
                                                  const RowProbs& factors, const Limits& of,
                                                  std::uint32_t (&a)[kPairs]) {
    const auto weighted = [&of](float factor, float g, float s, float u) {
      return factor * product_of<kActivation>(gate_with<kActivation>(g, s, of), u, of);
    };
#pragma unroll
    for (int first = 0; first < kPairs; first += kMatrixPairs) {
      float s[2 * kMatrixPairs];
      sigmoids_of<kActivation, kUsual>(reinterpret_cast<const MatrixPairs&>(gate[first]), of, s);
#pragma unroll
      for (int i = 0; i < kMatrixPairs; ++i) {
        const std::uint32_t g = gate[first + i], u = up[first + i];
        const float factor = factors.of[i % 2];
        a[first + i] = pack_pair(weighted(factor, low_of(g), s[2 * i], low_of(u)),
                                 weighted(factor, high_of(g), s[2 * i + 1], high_of(u)));
      }
    }
  }
};

/// h once more, where forward has not kept it. Maps: a, b and out0 as of fc1.
template <class Shape, bool kGeneral = false>
struct Refc1 : EmptyEpilogueSlots<Shape, (OutputRing<Shape>::borrows(Shape::kN / kBoxCols))> {
  static constexpr Stage kStage = Stage::kRefc1;
  static constexpr ptx::Major kMajorA = Fc1<Shape>::kMajorA;
  static constexpr ptx::Major kMajorB = Fc1<Shape>::kMajorB;
  static constexpr bool kReadsAnyOrder = kGeneral;
  static constexpr int kChunks = Fc1<Shape>::kChunks;
  static constexpr int kBoxes = 2 * kChunks;
  using Columns = ColumnsOfH<Shape, kGeneral>;
  static constexpr bool kBorrows = Refc1::kEpilogueSlots > 0;

  static __device__ __forceinline__ void load(const DeviceContext& ctx, const StageMaps& maps,
                                              OperandSlot<Shape>& slot, std::uint64_t* full,
                                              const TileWork& work, int first_token, int k_block) {
    Fc1<Shape, kGeneral>::load(ctx, maps, slot, full, work, first_token, k_block);
  }

  using Early = std::conditional_t<kGeneral, BiasOfH<Columns>, Nothing>;
  static __device__ __forceinline__ Early prepare(const Consumer<Shape>& consumer,
                                                  const TileWork& work) {
    return {consumer.ctx, work};
  }

  /// Boxes: both parts of each 64 columns.
  static __device__ __forceinline__ void finish(Consumer<Shape>& consumer,
                                                const float (&acc)[Shape::kAccumulators],
                                                const TileWork&, const Early& bias) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int first = box / 2 * 2 * kPairs + box % 2 * Shape::kAccumulators / 2;
      std::uint32_t half[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        half[i] = pack_pair(acc[first + 2 * i], acc[first + 2 * i + 1]);
      }
      if constexpr (kGeneral) {
        bias.add_to(consumer.ctx.view, box % 2, box / 2, half);
      }
      consumer.write_box(OutputRing<Shape>::box_of(box, kBoxes), half);
    }
    if (kBorrows) consumer.ring.advance();
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps& maps,
                                              const TileWork& work) {
    const int row = work.first_row + kConsumerRows * sender.index;
    const Columns columns(sender.ctx.view, work);
    sender.send_boxes(kBoxes, [&](int i, const std::uint8_t* box) {
      if (!has_rows(work, sender.index)) return;
      const int col = columns.first(i % 2) + i / 2 * kBoxCols;
      ptx::tma_store(maps.out0, box, col, columns.half(i % 2), row);
    });
    if (sender.lane == 0) sender.template signal_tile<kStage>(work);
  }
};

/// dx rows = dh w1, pushed. The first column tile also adds up the rows' dprobs, whose column
/// groups dfc2 has left. Maps: a = dh (2I, rows); b = w1 (H, 2I, El), boxes 64 x 64, or of each
/// matrix [in, out] (2I, H), box 64 x kN.
template <class Shape, bool kGeneral = false>
struct Dfc1 : RowPush<Shape> {
  static constexpr Stage kStage = Stage::kDfc1;
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kMn;
  static constexpr bool kReadsAnyOrder = kGeneral;

  static __device__ __forceinline__ void load(const DeviceContext& ctx, const StageMaps& maps,
                                              OperandSlot<Shape>& slot, std::uint64_t* full,
                                              const TileWork& work, int first_token, int k_block) {
    load_rows_and_weights<Dfc1>(ctx, maps, slot, full, work, first_token, k_block * kTileK);
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps&,
                                              const TileWork& work) {
    const PushRows rows = rows_to_push(sender, work);
    if (work.n == 0) push_dprobs<kGeneral>(sender, rows, work);
    push_rows<kStage>(sender, rows, work);
  }
};

}  // namespace uniep::cuda
