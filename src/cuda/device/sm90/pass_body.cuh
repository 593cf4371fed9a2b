#pragma once

#include "cuda/device/dispatch.cuh"
#include "cuda/device/sm90/dfc2.cuh"
#include "cuda/device/sm90/fc1.cuh"
#include "cuda/device/sm90/fc2.cuh"
#include "cuda/device/sm90/reduce_tiles.cuh"
#include "cuda/device/sm90/wgrad.cuh"

// The body of a megakernel: one CTA per SM runs tasks of any stage of a pass. Which stages a launch
// holds, and in what order their tiles stand, is in its queues alone.

namespace uniep::cuda {

/// The GEMM stages of a pass. `kIsGeneral`: of any experts, wherever the probability enters,
/// with or without biases; else of SwiGLU with probabilities ahead of fc2.
template <bool kIsGeneral, class... S>
struct StageList {
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr Pass kPass =
      ((S::kStage == Stage::kFc1) || ...) ? Pass::kForward : Pass::kBackward;
  /// Forward keeps what comes, and backward may make again what it did not keep.
  static constexpr DispatchKinds kDispatchKinds{.saves = kPass == Pass::kForward,
                                                .refetches = ((S::kStage == Stage::kRefc1) || ...),
                                                .weighs = kIsGeneral && kPass == Pass::kBackward,
                                                .ring = ((S::kStage == Stage::kRefc1) || ...)};

  /// Senders may read slots of the pipeline, too, and each is handed back by them as well.
  static constexpr bool kSendersRead = (may_sum_steps<S>() || ...);

  static constexpr bool has(Stage stage) { return ((stage == S::kStage) || ...); }

  /// f(stage struct) for the stage that the task is of.
  template <class F>
  static __device__ __forceinline__ void visit(Stage stage, F&& f) {
    ((stage == S::kStage ? f(S{}) : void()), ...);
  }
};
template <class Shape, bool kGeneral = false>
using ForwardStages = StageList<kGeneral, Fc1<Shape, kGeneral>, Fc2<Shape, kGeneral>>;
/// `Main`: of weight gradients that are added to.
template <class Shape, class Main, bool kGeneral = false>
using BackwardStages = StageList<kGeneral, Dfc2<Shape, kGeneral>, Dfc1<Shape, kGeneral>,
                                 Wgrad2<Shape, Main, kGeneral>, Wgrad1<Shape, Main, kGeneral>>;
/// Tiles of passes that recompute, or may have a ring of rows.
template <int kTileN>
using RingShape = TileShape<kTileN, true>;
template <class Shape, class Main, bool kGeneral = false>
using RecomputingStages =
    StageList<kGeneral, Refc1<Shape, kGeneral>, Dfc2<Shape, kGeneral>, Dfc1<Shape, kGeneral>,
              Wgrad2<Shape, Main, kGeneral>, Wgrad1<Shape, Main, kGeneral>>;

/// Whether a role knows what to do with the stage's tasks. Checked where this is compiled: nobody
/// would signal what a stage without a routine leaves undone. scheduler.cuh cuts the same grids.
template <class Stages>
constexpr bool has_routine(const StageRow& row) {
  switch (row.grid) {
    case TileGrid::kNone:
      return true;
    case TileGrid::kPulls:
      return row.stage == Stage::kDispatch || Stages::kDispatchKinds.refetches;
    case TileGrid::kRowTiles:
    case TileGrid::kWeightTiles:
      return Stages::has(row.stage);
    case TileGrid::kTokenBlocks:
      return row.stage == Reduce<TileShape<128>>::kStage;
    case TileGrid::kCrossings:
    case TileGrid::kReturns:
      break;
  }
  return false;
}
template <class Stages>
constexpr bool has_routines(Pass pass, GraphChoice choice) {
  bool all = true;
  kLayerGraph.for_each_stage(pass, [&](const StageRow& row) {
    all = all && (!holds(row.when, choice) || has_routine<Stages>(row));
  });
  return all;
}
static_assert(has_routines<ForwardStages<TileShape<128>>>(Pass::kForward, {true, true}));
static_assert(has_routines<BackwardStages<TileShape<128>, float>>(Pass::kBackward, {}));
static_assert(has_routines<RecomputingStages<RingShape<128>, float>>(Pass::kBackward,
                                                                     {true, true}));
static_assert(has_routines<RecomputingStages<RingShape<128>, float>>(Pass::kBackward,
                                                                     {true, true, true}));

/// The maps of a stage.
template <class S>
__device__ __forceinline__ const StageMaps& maps_of(const PassMaps& maps) {
  constexpr int kNumber = product_number(S::kStage);
  return maps.stages[kNumber];
}

/// The loader: one thread that keeps the pipeline full, and has the next task drawn in time.
template <class Stages, class Shape>
__device__ __forceinline__ void run_loader(const DeviceContext& ctx, const PassMaps& maps,
                                           PassShared<Shape>& shared) {
  SlotRing<Shape> slots;
  TaskReader<Shape> tasks(shared);
  const auto next_slot = [&](auto&& load, bool senders_read = false) {
    ptx::mbarrier_wait(&shared.empty[slots.slot], slots.parity ^ 1);
    if constexpr (Stages::kSendersRead) {
      if (!senders_read) ptx::mbarrier_arrive(&shared.empty[slots.slot], 32 * kConsumers);
    }
    load(shared.slots[slots.slot], &shared.full[slots.slot]);
    slots.advance();
  };
  const auto want_task = [&] { ptx::mbarrier_arrive(&shared.wanted); };
  for (;;) {
    const TileWork work = tasks.task();
    if (work.stage == kNoStage) return;
    tasks.next();
    if (work.stage == Reduce<Shape>::kStage) {
      want_task();
      Reduce<Shape>::for_each_chunk(ctx.view, work, [&](const auto& chunk) {
        next_slot([&](auto& slot, auto* full) { Reduce<Shape>::load(ctx, slot, full, chunk); });
      });
      continue;
    }
    Stages::visit(work.stage, [&](auto stage) {
      using S = decltype(stage);
      const StageMaps& m = maps_of<S>(maps);
      const int draw_at = max_of(work.k_blocks - kDrawAhead, 0);
      if constexpr (requires { S::prefetch_epilogue(ctx, m, work); }) {
        S::prefetch_epilogue(ctx, m, work);
      }
      const bool senders_read = sums_steps<S, Shape>(ctx.view, work);
      const int first_token = first_token_row<S>(ctx, work);
      for (int k = 0; k < work.k_blocks; ++k) {
        if (k == draw_at) want_task();
        const auto load = [&](auto& slot, auto* full) {
          ptx::mbarrier_arrive_expect(full, step_bytes<S, Shape>(work));
          if (work.rows > 0) S::load(ctx, m, slot, full, work, first_token, k);
        };
        next_slot(load, senders_read);
      }
      const int more = epilogue_slots<S>(ctx);
      for (int i = 0; i < more; ++i) {
        next_slot([&](auto& slot, auto* full) { S::load_epilogue(ctx, m, slot, full, work, i); });
      }
    });
  }
}

template <class Stages, class Shape>
__device__ __forceinline__ void run_sender(const DeviceContext& ctx, const PassMaps& maps,
                                           PassShared<Shape>& shared) {
  Sender<Shape> sender(ctx, shared);
  TaskReader<Shape> tasks(shared);
  for (;; tasks.next()) {
    const TileWork& work = tasks.task();
    if (work.stage == kNoStage) break;
    sender.tile_number = tasks.number();
    const SlotRing<Shape> steps = sender.ring;
    sender.ring.advance(work.k_blocks);
    Stages::visit(work.stage, [&](auto stage) {
      using S = decltype(stage);
      if constexpr (may_sum_steps<S>()) {
        if (sums_steps<S, Shape>(ctx.view, work)) sum_steps<S>(sender, work, steps);
      }
      S::send(sender, maps_of<S>(maps), work);
    });
    if constexpr (Shape::kMayHaveRing) sender.release_rows(work);
    if (sender.index == 0 && sender.lane == 0) {
      tasks.note(ctx.trace, [](TraceRecord& r) { r.sent = ptx::global_nanoseconds(); });
    }
  }
  if (sender.lane == 0) ptx::bulk_wait<0>();  // weight gradients, which nobody else waits for
}

/// A tile of a product, whose right operand lies as `kB` says.
template <class S, ptx::Major kB, class Shape>
__device__ __forceinline__ void compute_tile(Consumer<Shape>& consumer, const TileWork& work) {
  float acc[Shape::kAccumulators];
  auto early = S::prepare(consumer, work);
  const auto proceed = [&] {
    if constexpr (requires { S::proceed(consumer, work, early); }) {
      S::proceed(consumer, work, early);
    }
  };
  sum_products<S, kB>(consumer, work, acc, proceed);
  S::finish(consumer, acc, work, early);
}

template <class Stages, class Shape>
__device__ __forceinline__ void run_consumer(const DeviceContext& ctx, PassShared<Shape>& shared) {
  Consumer<Shape> consumer(ctx, shared);
  TaskReader<Shape> tasks(shared);
  const bool notes = threadIdx.x == 128;
  for (;; tasks.next()) {
    const TileWork& work = tasks.task();
    if (work.stage == kNoStage) return;
    if (notes) {
      tasks.note(ctx.trace, [](TraceRecord& r) {
        r.begun = ptx::global_nanoseconds();
        r.begun_cycle = ptx::sm_cycles();
      });
    }
    if (work.stage == Reduce<Shape>::kStage) {
      Reduce<Shape>::template run<Stages::kGeneral, Stages::kPass>(consumer, work);
    }
    Stages::visit(work.stage, [&](auto stage) {
      using S = decltype(stage);
      constexpr ptx::Major kB = S::kMajorB;
      if constexpr (may_read_in_out<S>()) {
        if (reads_in_out<S>(ctx, work)) return compute_tile<S, other(kB)>(consumer, work);
      }
      compute_tile<S, kB>(consumer, work);
    });
    if (notes) {
      tasks.note(ctx.trace, [](TraceRecord& r) {
        r.done = ptx::global_nanoseconds();
        r.done_cycle = ptx::sm_cycles();
      });
    }
  }
}

template <class Stages, class Shape>
__device__ __forceinline__ void init_barriers(PassShared<Shape>& shared) {
  constexpr int kReaders = kConsumerWarps + (Stages::kSendersRead ? kConsumers : 0);  // warps
  for (int i = 0; i < Shape::kSlots; ++i) {
    ptx::mbarrier_init(&shared.full[i], 1);
    ptx::mbarrier_init(&shared.empty[i], 32 * kReaders);
  }
  for (int i = 0; i < kWorkSlots; ++i) {
    ptx::mbarrier_init(&shared.work_full[i], 1);
    ptx::mbarrier_init(&shared.work_empty[i], 1 + 32 * (kConsumers + kConsumerWarps));
  }
  ptx::mbarrier_init(&shared.wanted, 1);
  for (int c = 0; c < kConsumers; ++c) {
    for (int i = 0; i < Shape::kBoxes; ++i) {
      ptx::mbarrier_init(&shared.written[c][i], 32 * kConsumerWarps / kConsumers);
      ptx::mbarrier_init(&shared.sent[c][i], 32);
    }
  }
  for (int& halves : shared.halves_sent) halves = 0;
  ptx::mbarrier_init_fence();
}

template <class Stages, class Shape>
__device__ __forceinline__ void run_pass(const DeviceContext& ctx, const LaunchQueues& queues,
                                         const PassMaps& maps, PassShared<Shape>& shared) {
  static_assert(sizeof(DispatchShared) <= offsetof(PassShared<Shape>, full),
                "dispatch would overwrite the barriers");
  if (threadIdx.x == 0) {
    init_barriers<Stages>(shared);
    shared.first_record = Tracer::first_record(ctx.trace, static_cast<int>(blockIdx.x));
  }
  __syncthreads();
  const Roles roles = roles_under_load(ctx.view, queues.even, static_cast<int>(gridDim.x));
  if (static_cast<int>(blockIdx.x) < roles.dispatchers) {
    dispatch_tasks<Stages::kDispatchKinds>(ctx, queues, roles.dispatchers,
                                           reinterpret_cast<DispatchShared&>(shared));
    if (!roles.join) return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4) {
    ptx::give_registers<kProducerRegisters>();
    if (warp >= kFirstSenderWarp) run_sender<Stages>(ctx, maps, shared);
    if (warp == kLoaderWarp && threadIdx.x % 32 == 0) run_loader<Stages>(ctx, maps, shared);
    if (warp == kSchedulerWarp) schedule_tasks(ctx, queues, shared);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    run_consumer<Stages>(ctx, shared);
  }
}

}  // namespace uniep::cuda
