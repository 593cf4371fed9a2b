#pragma once

#include "cuda/device/activation.cuh"
#include "cuda/device/epilogue.cuh"

// The GEMMs with w2: fc2 with the push, and its data gradient dfc2 with dSwiGLU in its epilogue.

namespace uniep::cuda {

/// y = a w2^T, pushed.
/// Maps: a = a (I, rows); b = w2 (I, H, El), box 64 x 256.
struct Fc2 : NoEpilogueLoads {
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kK;

  static __device__ __forceinline__ TileWork work(const DeviceContext& ctx, const Task& task) {
    return row_tile_work(ctx, task, static_cast<int>(task.n) * kTileN, ctx.view.intermediate);
  }

  static __device__ __forceinline__ void load(const StageMaps& maps, GemmShared& shared, int slot,
                                              const TileWork& work, int k_block) {
    std::uint64_t* full = &shared.full[slot];
    const int k = k_block * kTileK;
    load_rows(maps, shared, slot, work, k);
    ptx::tma_load(shared.b[slot], maps.b, full, k, work.n, work.expert);
  }

  class Epilogue {
   public:
    __device__ __forceinline__ Epilogue(const DeviceContext& ctx, const StageMaps&,
                                        GemmShared& shared)
        : pusher_(ctx, shared) {}
    __device__ __forceinline__ void prepare(const TileWork&) {}
    __device__ __forceinline__ void run(const float (&acc)[128], const TileWork& work, StageRing&) {
      pusher_.flush();
      pusher_.prepare(work);
      pusher_.push(acc, work);
    }
    __device__ __forceinline__ void finish() { pusher_.flush(); }

   private:
    RowPusher pusher_;
  };
};

/// da = dy w2, and from it dh, the column groups of dprobs, and a once more (for wgrad2).
/// Maps: a = dy_rows (H, rows); b = w2 (I, H, El), boxes 64 x 64; aux = h (I, 2, rows), box 64 x
/// 128; out0 = dh (I, 2, rows), out1 = a (I, rows), boxes 64 x 16.
struct Dfc2 {
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = ptx::Major::kMn;

  static __device__ __forceinline__ TileWork work(const DeviceContext& ctx, const Task& task) {
    return row_tile_work(ctx, task, static_cast<int>(task.n) * kTileN, ctx.view.hidden);
  }

  static __device__ __forceinline__ void load(const StageMaps& maps, GemmShared& shared, int slot,
                                              const TileWork& work, int k_block) {
    std::uint64_t* full = &shared.full[slot];
    const int k = k_block * kTileK;
    load_rows(maps, shared, slot, work, k);
    load_squares<kTileN / 64>(shared.b[slot], maps.b, full, work.n, k, work.expert);
  }

  /// The tile's h comes through the pipeline too, 64 columns of either half a slot: the gate half
  /// where a lies, the up half where b begins.
  static constexpr int kEpilogueLoads = kTileN / kBoxCols;
  static __device__ __forceinline__ void load_epilogue(const StageMaps& maps, GemmShared& shared,
                                                       int slot, const TileWork& work, int chunk) {
    std::uint64_t* full = &shared.full[slot];
    ptx::mbarrier_arrive_expect(full, 2 * kTileM * kBoxCols * 2);
    const int col = work.n + chunk * kBoxCols;
    ptx::tma_load(shared.a[slot], maps.aux, full, col, 0, work.first_row);
    ptx::tma_load(shared.b[slot], maps.aux, full, col, 1, work.first_row);
  }

  class Epilogue {
   public:
    __device__ __forceinline__ Epilogue(const DeviceContext& ctx, const StageMaps& maps,
                                        GemmShared& shared)
        : ctx_(ctx), maps_(maps), shared_(shared), boxes_(shared), signal_(ctx, shared) {}

    __device__ __forceinline__ void prepare(const TileWork& work) {
      const int row = work.first_row + place_.first_row() + place_.lane / 4;
      probs_[0] = ctx_.row_probs[row];
      probs_[1] = ctx_.row_probs[row + 8];
    }

    __device__ __forceinline__ void run(const float (&acc)[128], const TileWork& work,
                                        StageRing& stages) {
      signal_.flush();
      const int row = work.first_row + place_.first_row();
#pragma unroll
      for (int chunk = 0; chunk < kEpilogueLoads; ++chunk) {
        ptx::mbarrier_wait(&shared_.full[stages.slot], stages.parity);
        std::uint8_t* gate_box = shared_.a[stages.slot] + place_.first_row() * kBoxCols * 2;
        std::uint8_t* up_box = shared_.b[stages.slot] + place_.first_row() * kBoxCols * 2;
        std::uint32_t gate[kPairs], up[kPairs], a[kPairs];
        load_box(gate_box, gate);
        load_box(up_box, up);
        float group[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int j = chunk * 2 * kPairs + 2 * i;
          const std::uint32_t da = pack_pair(acc[j], acc[j + 1]);
          const float p = probs_[i % 2];
          const Gradients low = gradients(p, low_of(da), low_of(gate[i]), low_of(up[i]));
          const Gradients high = gradients(p, high_of(da), high_of(gate[i]), high_of(up[i]));
          gate[i] = pack_pair(low.gate, high.gate);
          up[i] = pack_pair(low.up, high.up);
          a[i] = pack_pair(low.a, high.a);
          group[i % 2] = group[i % 2] + low.dprob;
          group[i % 2] = group[i % 2] + high.dprob;
        }
        const int col = work.n + chunk * kBoxCols;
        store_group(group, row, col);
        // dh replaces h in the slot, of which this warp alone uses these rows.
        __syncwarp();
        store_box(gate_box, gate);
        store_box(up_box, up);
        ptx::fence_proxy_async_shared();
        __syncwarp();
        if (place_.lane == 0) {
          ptx::tma_store(maps_.out0, gate_box, col, 0, row);
          ptx::tma_store(maps_.out0, up_box, col, 1, row);
          ptx::bulk_commit();
        }
        boxes_.write(a, maps_.out1, col, row, 0);
        if (place_.lane == 0) ptx::bulk_wait_read<0>();
        release_slot(shared_, stages.slot);
        stages.advance();
      }
      signal_.arm(work.task, ctx_.counters.tile_done + work.counter,
                  ctx_.counters.expert_done + work.expert);
    }

    __device__ __forceinline__ void finish() { signal_.flush(); }

   private:
    struct Gradients {
      float gate, up, a, dprob;
    };

    static __device__ __forceinline__ Gradients gradients(float p, float da, float gate, float up) {
      const float s = sigmoid(gate);
      const float activated = silu(gate, s);
      const float product = activated * up;
      const float weighted = p * da;
      return {(weighted * up) * silu_grad(gate, s), weighted * activated, p * product,
              da * product};
    }

    /// dprobs of 64 columns: a thread's columns ascending, then the four threads of a row pairwise.
    /// The same order whatever the tile, so bit-neutral; the CPU backend uses another one.
    __device__ __forceinline__ void store_group(const float (&group)[2], int row, int col) {
      const std::int64_t groups = ceil_div(ctx_.view.intermediate, kDprobGroup);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = group[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (place_.lane % 4 == 0 && col < ctx_.view.intermediate) {
          const std::int64_t r = row + place_.lane / 4 + 8 * half;
          ctx_.dprob_groups[r * groups + col / kDprobGroup] = sum;
        }
      }
    }

    const DeviceContext& ctx_;
    const StageMaps& maps_;
    GemmShared& shared_;
    WarpPlace place_;
    BoxWriter boxes_;
    TileSignal signal_;
    float probs_[2];
  };
};

}  // namespace uniep::cuda
