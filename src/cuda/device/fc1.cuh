#pragma once

#include "cuda/device/activation.cuh"
#include "cuda/device/epilogue.cuh"

// The GEMMs with w1: fc1 with SwiGLU in its epilogue, and its data gradient dfc1 with the push.

namespace uniep::cuda {

/// h = x w1^T and a = p (silu(h_g) h_u). The tile's columns are 128 of the gate half, then the same
/// 128 of the up half, so a thread holds both halves of each of its elements.
/// Maps: a = x_rows (H, rows); b = w1 (H, I, 2, El), box 64 x 128; out0 = h (I, 2, rows), out1 =
/// a (I, rows), boxes 64 x 16.
struct Fc1 : NoEpilogueLoads {
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kK;
  static constexpr int kHalf = kTileN / 2;

  static __device__ __forceinline__ TileWork work(const DeviceContext& ctx, const Task& task) {
    return row_tile_work(ctx, task, static_cast<int>(task.n) * kHalf, ctx.view.hidden);
  }

  static __device__ __forceinline__ void load(const StageMaps& maps, GemmShared& shared, int slot,
                                              const TileWork& work, int k_block) {
    std::uint64_t* full = &shared.full[slot];
    const int k = k_block * kTileK;
    load_rows(maps, shared, slot, work, k);
    ptx::tma_load(shared.b[slot], maps.b, full, k, work.n, 0, work.expert);
    ptx::tma_load(shared.b[slot] + kHalf * kTileK * 2, maps.b, full, k, work.n, 1, work.expert);
  }

  class Epilogue {
   public:
    __device__ __forceinline__ Epilogue(const DeviceContext& ctx, const StageMaps& maps,
                                        GemmShared& shared)
        : ctx_(ctx), maps_(maps), boxes_(shared), signal_(ctx, shared) {}

    __device__ __forceinline__ void prepare(const TileWork& work) {
      const int row = work.first_row + place_.first_row() + place_.lane / 4;
      probs_[0] = ctx_.row_probs[row];
      probs_[1] = ctx_.row_probs[row + 8];
    }

    __device__ __forceinline__ void run(const float (&acc)[128], const TileWork& work, StageRing&) {
      signal_.flush();
      const int row = work.first_row + place_.first_row();
#pragma unroll
      for (int chunk = 0; chunk < kHalf / kBoxCols; ++chunk) {
        std::uint32_t gate[kPairs], up[kPairs], a[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int j = chunk * 2 * kPairs + 2 * i;
          gate[i] = pack_pair(acc[j], acc[j + 1]);
          up[i] = pack_pair(acc[64 + j], acc[64 + j + 1]);
          const float p = probs_[i % 2];
          a[i] = pack_pair(weighted(p, low_of(gate[i]), low_of(up[i])),
                           weighted(p, high_of(gate[i]), high_of(up[i])));
        }
        const int col = work.n + chunk * kBoxCols;
        boxes_.write(gate, maps_.out0, col, 0, row);
        boxes_.write(up, maps_.out0, col, 1, row);
        boxes_.write(a, maps_.out1, col, row, 0);
      }
      signal_.arm(work.task, ctx_.counters.tile_done + work.counter, nullptr);
    }

    __device__ __forceinline__ void finish() { signal_.flush(); }

   private:
    static __device__ __forceinline__ float weighted(float p, float gate, float up) {
      return p * (silu(gate, sigmoid(gate)) * up);
    }

    const DeviceContext& ctx_;
    const StageMaps& maps_;
    WarpPlace place_;
    BoxWriter boxes_;
    TileSignal signal_;
    float probs_[2];
  };
};

/// dx rows = dh w1, pushed. The first column tile also adds up the rows' dprobs, whose column
/// groups dfc2 has left. Maps: a = dh (2I, rows); b = w1 (H, 2I, El), boxes 64 x 64.
struct Dfc1 : NoEpilogueLoads {
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kMn;

  static __device__ __forceinline__ TileWork work(const DeviceContext& ctx, const Task& task) {
    return row_tile_work(ctx, task, static_cast<int>(task.n) * kTileN, 2 * ctx.view.intermediate);
  }

  static __device__ __forceinline__ void load(const StageMaps& maps, GemmShared& shared, int slot,
                                              const TileWork& work, int k_block) {
    std::uint64_t* full = &shared.full[slot];
    const int k = k_block * kTileK;
    load_rows(maps, shared, slot, work, k);
    load_squares<kTileN / 64>(shared.b[slot], maps.b, full, work.n, k, work.expert);
  }

  class Epilogue {
   public:
    __device__ __forceinline__ Epilogue(const DeviceContext& ctx, const StageMaps&,
                                        GemmShared& shared)
        : ctx_(ctx), pusher_(ctx, shared) {}

    __device__ __forceinline__ void prepare(const TileWork&) {}

    __device__ __forceinline__ void run(const float (&acc)[128], const TileWork& work, StageRing&) {
      pusher_.flush();
      pusher_.prepare(work);
      pusher_.push(acc, work);
      if (work.n == 0) push_dprob(work);
    }

    __device__ __forceinline__ void finish() { pusher_.flush(); }

   private:
    __device__ __forceinline__ void push_dprob(const TileWork& work) {
      const RowOrigin& origin = pusher_.origin();
      if (origin.source < 0) return;
      const std::int64_t groups = ceil_div(ctx_.view.intermediate, kDprobGroup);
      const std::int64_t row = work.first_row + place_.first_row() + place_.lane;
      float sum = 0;
      for (std::int64_t g = 0; g < groups; ++g) sum += ctx_.dprob_groups[row * groups + g];
      ctx_.at<float>(origin.source, ctx_.symmetric.dprobs)[pusher_.slot()] = sum;
    }

    const DeviceContext& ctx_;
    WarpPlace place_;
    RowPusher pusher_;
  };
};

}  // namespace uniep::cuda
