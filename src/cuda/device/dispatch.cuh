#pragma once

#include "base/row_factors.h"
#include "cuda/device/dispatch_chunks.cuh"
#include "cuda/device/dispatch_shape.h"
#include "cuda/device/scaled_rows.cuh"
#include "cuda/device/sm90/tile_shape.h"
#include "cuda/device/trace.cuh"
#include "cuda/device/waits.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ptx/tma.cuh"
#include "schedule/received_tokens.h"

namespace uniep::cuda {

// Dispatch: every warp pulls tokens by bulk copy into its buffers in shared memory, as many under
// way as there are buffers, and stores each to all of its local rows. Nothing else waits for
// memory: pulls are read a task at a time, a lane each, the next task's ahead of time; row numbers
// are read while the token before is stored; and counters are raised some pulls behind, four at a
// time. Only in its first task a warp waits for its stores, behind each 32 pulls or fewer, since by
// then all other SMs wait for these.

inline constexpr int kWarpBufferBytes = 18944;
inline constexpr int kPullBytes = kWarpBufferBytes / 2;  // most of a token at a time
inline constexpr int kMaxPullBuffers = 8;

struct DispatchShared {
  alignas(128) std::uint8_t buffers[kDispatchWarps][kWarpBufferBytes];
  std::uint64_t full[kDispatchWarps][kMaxPullBuffers];
};

// All but forward's dispatch wait for room in a ring of rows, if there is one; other than for that,
// dispatch and redispatch for tokens, and expand for nothing.
static_assert(kWaitsOf<Stage::kRedispatch> ==
              (kWaitsOf<Stage::kDispatch> | bit_of(CounterKind::kReleased)));
static_assert(kWaitsOf<Stage::kExpand> == bit_of(CounterKind::kReleased));
static_assert(kSignalsOf<Stage::kRedispatch> == kSignalsOf<Stage::kExpand>);
static_assert(kSignalsOf<Stage::kDispatch> == bit_of(CounterKind::kRowsReady) &&
              kLayerGraph[CounterKind::kRowsReady].of == CounterOf::kRowGroup);

/// What a pass may have of these besides dispatch.
struct DispatchKinds {
  bool saves = false;      // what comes is kept: its rows, or each token once
  bool refetches = false;  // tasks of redispatch or expand
  bool weighs = false;     // rows of dy may be weighed with their probabilities
  bool ring = false;       // tensors of the call may be a ring of rows
};

/// One warp's work.
template <DispatchKinds kKinds>
class DispatchWarp {
 public:
  __device__ __forceinline__ DispatchWarp(const DeviceContext& ctx, const LaunchQueues& queues,
                                          int dispatchers, DispatchShared& shared)
      : ctx_(ctx),
        queues_(queues),
        dispatchers_(dispatchers),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        buffers_(shared.buffers[warp_]),
        full_(shared.full[warp_]),
        token_bytes_(ctx.view.stage(Stage::kDispatch).wire.pulled_token),
        chunks_(ceil_div(token_bytes_, kPullBytes)),
        buffer_bytes_(round_up(min_of(token_bytes_, kPullBytes), 128)),
        num_buffers_(min_of(kWarpBufferBytes / buffer_bytes_, kMaxPullBuffers)),
        keeps_tokens_(kKinds.saves && keeps_received(ctx.view.choice)),
        in_ring_(kKinds.ring && ctx.view.ring_rows > 0),
        // Neighbours pull from one rank: what lies in the local memory does not queue behind
        // NVLink.
        next_task_(std::int64_t{blockIdx.x} * kDispatchWarps + warp_),
        trace_(ctx.trace, static_cast<int>(gridDim.x + blockIdx.x * kDispatchWarps) + warp_) {
    if (lane_ == 0) {
      for (int i = 0; i < num_buffers_; ++i) ptx::mbarrier_init(&full_[i], 1);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
  }

  /// Runs this warp's tasks: pulls and their chunks in order, loads ahead of stores.
  __device__ __forceinline__ void run() {
    current_ = read_batch();
    upcoming_ = read_batch();
    row_ = row_of(0);
    begin_batch();
    for (bool ready = true; ready && current_.pulls > 0;) ready = run_group();
    end();
  }

 private:
  static constexpr int kGroup = ChunkRows::kChunks;
  /// Lanes below have a row of the pull each.
  static constexpr int kKeepingLane = 31;
  static_assert(kMaxTopk <= kKeepingLane);

  static __device__ __forceinline__ bool is(Stage stage, Stage other) {
    return kKinds.refetches && stage == other;
  }
  static __device__ __forceinline__ bool refetches(const PullBatch& batch) {
    return is(batch.stage, Stage::kRedispatch) || is(batch.stage, Stage::kExpand);
  }

  /// This lane's pull, whose token lies or goes among those that are kept.
  __device__ __forceinline__ void find_received(PullBatch& batch) const {
    const bool expands = is(batch.stage, Stage::kExpand);
    if (!expands && !keeps_tokens_) return;
    const int token = received_token(ctx_.view, batch.pull);
    if (expands) {
      batch.pull.token = static_cast<int>(received_place<std::uint32_t>(ctx_.view, token));
    } else if (keeps_token(ctx_.view, batch.pull, token)) {
      batch.keep_at = static_cast<int>(received_place<std::uint32_t>(ctx_.view, token));
    }
  }

  /// Pulls are drawn a task at a time.
  __device__ __forceinline__ Task task_at(std::int64_t draw) const {
    return queue_draw(ctx_.view, queues_.comm, draw).task(ctx_.view, 0);
  }

  __device__ __forceinline__ PullBatch read_batch() {
    PullBatch batch;
    if (next_task_ >= queues_.comm.size()) return batch;
    const Task task = task_at(next_task_);
    const auto left = static_cast<int>(task.n) - next_pull_;
    const int pulls = min_of(left, 32);
    batch.stage = kKinds.refetches ? task.stage : Stage::kDispatch;
    if (in_ring()) {
      batch.expert = task.expert;
      batch.last_row = static_cast<int>(ctx_.view.segment_begin[task.expert] +
                                        ctx_.view.tokens_per_expert[task.expert] - 1);
    }
    if (lane_ < pulls) {
      batch.pull = ctx_.view.pulls[task.first_pull() + next_pull_ + lane_];
      if constexpr (kKinds.saves || kKinds.refetches) find_received(batch);
    }
    batch.pulls = pulls;
    batch.tile = name_of(task).tile;
    batch.task = next_task_;
    next_pull_ += pulls;
    if (pulls == left) {
      next_pull_ = 0;
      next_task_ += std::int64_t{kDispatchWarps} * dispatchers_;
    }
    return batch;
  }

  /// The lane's value in the lane that has a pull, which may be of the upcoming batch.
  template <class T>
  __device__ __forceinline__ T of_pull(int pull, T current, T upcoming) const {
    const bool later = pull >= current_.pulls;
    return __shfl_sync(kWholeWarp, later ? upcoming : current,
                       later ? pull - current_.pulls : pull);
  }
  __device__ __forceinline__ int pulls_at_hand() const { return current_.pulls + upcoming_.pulls; }
  /// Known to the compiler where there is none: kernels without a ring have no registers for one.
  __device__ __forceinline__ bool in_ring() const {
    if constexpr (!kKinds.ring) return false;
    return in_ring_;
  }
  /// How many of the pulls at hand have room for their rows.
  __device__ __forceinline__ int pulls_with_room() const {
    if (!in_ring()) return pulls_at_hand();
    if (current_.expert > roomy_) return 0;
    return current_.pulls + (upcoming_.expert > roomy_ ? 0 : upcoming_.pulls);
  }
  __device__ __forceinline__ int bytes_of(int chunk) const {
    return min_of(kPullBytes, token_bytes_ - chunk * kPullBytes);
  }

  /// This lane's row of a pull, or place; kNoRow in the other lanes.
  __device__ __forceinline__ int row_of(int pull) const {
    if (pull >= pulls_at_hand()) return kNoRow;
    const auto first = of_pull(pull, current_.pull.first_row, upcoming_.pull.first_row);
    const auto rows = of_pull(pull, current_.pull.num_rows, upcoming_.pull.num_rows);
    if constexpr (kKinds.saves) {
      if (keeps_tokens_) {
        const int place = of_pull(pull, current_.keep_at, upcoming_.keep_at);
        if (lane_ == kKeepingLane) return place;
      }
    }
    if (lane_ >= rows) return kNoRow;
    return static_cast<int>(ctx_.view.pull_rows[first + lane_]);
  }

  /// The row's number in the tensor that this pass dispatches to: what is dispatched again is not
  /// saved. A token's place stays.
  __device__ __forceinline__ int place_of(int row) const {
    if constexpr (kKinds.saves) {
      if (row != kNoRow) return static_cast<int>(ctx_.row<Tensor::kXRows>(row));
    }
    if (in_ring() && row != kNoRow) return static_cast<int>(ring_row(ctx_.view, row));
    return row;
  }

  /// Elements of `target` ahead of this lane's place.
  __device__ __forceinline__ std::int64_t offset_of(int place) const {
    const bool keeps = kKinds.saves && lane_ == kKeepingLane;
    const auto width = static_cast<std::uint32_t>(keeps ? kPlaceElements : ctx_.view.hidden);
    return static_cast<std::int64_t>(std::uint64_t{static_cast<std::uint32_t>(place)} * width);
  }

  /// Waits until whoever had the places of the current batch's expert in the ring before is done
  /// with them, and with those of experts before it that this warp has not waited for. They may
  /// wait for rows that this warp has stored: it signals all of them first. False: a wait expired.
  __device__ __forceinline__ bool wait_for_room() {
    ptx::bulk_wait<0>();
    fence_signals();
    signal(unsignalled_);
    unsignalled_ = ChunkRows::none_of(current_);
    int ready = 1;
    if (lane_ == 0) {
      const Task task = task_at(current_.task);
      for_each_counter<kWaitsOf<Stage::kExpand>>([&](CounterKind kind) {
        for (int expert = roomy_ + 1; expert <= current_.expert; ++expert) {
          for_each_release_wait(ctx_.view, kind, expert,
                                [&](const Wait& wait) { ready &= wait_for(ctx_, task, wait); });
        }
      });
      ptx::fence_proxy_async();
    }
    roomy_ = current_.expert;
    return __shfl_sync(kWholeWarp, ready, 0) != 0;
  }

  /// Zeroes the rows behind an expert's last, up to a whole step of the weight gradients: what lies
  /// there in a ring is another expert's.
  __device__ __forceinline__ void zero_pad_rows(int last_row) const {
    const auto step = static_cast<int>(kTileK);
    const int first = last_row + 1;
    const auto begin = static_cast<int>(ctx_.view.segment_begin[current_.expert]);
    const int end = begin + round_up(first - begin, step);
    bf16* const rows = target();
    for (int row = first; row < end; ++row) {
      auto* to = reinterpret_cast<uint4*>(rows + ring_row(ctx_.view, row) * ctx_.view.hidden);
      for (std::int64_t c = lane_; c < ctx_.view.hidden / 8; c += 32) to[c] = uint4{0, 0, 0, 0};
    }
  }

  /// Stores up to kGroup chunks of the current batch. Then come the signals of the group before,
  /// and after the last group of a batch of the first task those of both. False: a wait expired.
  /// Nothing here is unrolled: what takes time is the number of instructions.
  __device__ __forceinline__ bool run_group() {
    if (in_ring() && current_.expert > roomy_ && !wait_for_room()) return false;
    ChunkRows rows = ChunkRows::none_of(current_);
    const bool first_task = current_.task < std::int64_t{kDispatchWarps} * dispatchers_;
    int stored = 0;
#pragma unroll 1
    for (;;) {
      if (!fill_buffers()) return false;
      if (stored == kGroup || store_.pull == current_.pulls) break;
      const int row = store();
      ptx::bulk_commit();
      rows.put(stored++, row);
    }
#pragma unroll 1
    for (int i = stored; i < kGroup; ++i) ptx::bulk_commit();
    const bool ends_batch = store_.pull == current_.pulls;
    if (ends_batch) next_batch();
    const bool at_once = ends_batch && first_task;
    if (at_once) {
      ptx::bulk_wait<0>();
    } else {
      ptx::bulk_wait<kGroup>();  // the groups before this one have landed
    }
    fence_signals();
#pragma unroll 1
    for (int more = at_once ? 1 : 0; more >= 0; --more) {
      signal(unsignalled_);
      unsignalled_ = rows;
      rows = ChunkRows::none_of(current_);
    }
    return true;
  }

  /// Asks for chunks until all buffers are in use.
  __device__ __forceinline__ bool fill_buffers() {
    // With few buffers the stores of the last chunk are waited for, until they have been read; else
    // only those before.
    const int most = num_buffers_ - (num_buffers_ >= 4 ? 1 : 0);
    const int end = pulls_with_room();
    if (under_way_ >= most || load_.pull >= end) return true;
    if (num_buffers_ >= 4) {
      ptx::bulk_wait_read<1>();
    } else {
      ptx::bulk_wait_read<0>();
    }
    __syncwarp();
#pragma unroll 1
    do {
      if (!load()) return false;
    } while (under_way_ < most && load_.pull < end);
    return true;
  }

  /// Waits until the ranks that a batch pulls from have published. False: a wait expired.
  __device__ __forceinline__ bool wait_for_sources(const PullBatch& batch) {
    const bool pulls = lane_ < batch.pulls && !is(batch.stage, Stage::kExpand);
    unsigned unseen = __reduce_or_sync(kWholeWarp, pulls ? 1u << batch.pull.source : 0u) & ~seen_;
    if (unseen == 0) return true;
    seen_ |= unseen;
    int ready = 1;
    for (; lane_ == 0 && unseen != 0; unseen &= unseen - 1) {
      const int source = __ffs(static_cast<int>(unseen)) - 1;
      for_each_counter<kWaitsOf<Stage::kDispatch>>([&](CounterKind kind) {
        ready &= wait_for(ctx_, task_at(batch.task), source_wait(ctx_.view, kind, source));
      });
    }
    __syncwarp();
    ptx::fence_proxy_async();  // by all lanes, each of which will ask for chunks
    return __shfl_sync(kWholeWarp, ready, 0) != 0;
  }

  /// Asks for the next chunk, by the lane that has its pull.
  __device__ __forceinline__ bool load() {
    const bool later = load_.pull >= current_.pulls;
    const PullBatch& batch = later ? upcoming_ : current_;
    const int pull = later ? load_.pull - current_.pulls : load_.pull;
    if (pull == 0 && load_.chunk == 0 && !wait_for_sources(batch)) return false;
    if (lane_ == pull) {
      const int bytes = bytes_of(load_.chunk);
      const auto* token = reinterpret_cast<const std::byte*>(token_of(batch, batch.pull));
      ptx::mbarrier_arrive_expect(&full_[load_.buffer], bytes);
      ptx::bulk_load(buffers_ + load_.buffer * buffer_bytes_, token + load_.chunk * kPullBytes,
                     bytes, &full_[load_.buffer]);
    }
    load_.advance(num_buffers_, chunks_);
    ++under_way_;
    return true;
  }

  /// The tokens of a rank; where there is one rank, which `enter` does not copy, the caller's.
  __device__ __forceinline__ const bf16* tokens_of(Stage stage, int rank) const {
    const bool again = is(stage, Stage::kRedispatch);
    if (ctx_.view.num_ranks == 1) {
      return again ? ctx_.get<Tensor::kX>() : ctx_.get_of_pass<Tensor::kX, Tensor::kDy>();
    }
    const Peer peer = ctx_.peer(rank);
    return again ? peer.get<Tensor::kXTokens>() : peer.get<Tensor::kTokens>();
  }

  __device__ __forceinline__ const bf16* token_of(const PullBatch& batch, const Pull& pull) const {
    const bool expands = is(batch.stage, Stage::kExpand);
    const bf16* tokens =
        expands ? ctx_.get<Tensor::kReceived>() : tokens_of(batch.stage, pull.source);
    const auto width = static_cast<std::uint32_t>(expands ? kPlaceElements : ctx_.view.hidden);
    return tokens + std::uint64_t{static_cast<std::uint32_t>(pull.token)} * width;
  }

  /// What the lane's row of the current batch is a row of.
  __device__ __forceinline__ bf16* target() const {
    if (kKinds.saves && lane_ == kKeepingLane) return ctx_.get<Tensor::kReceived>();
    return refetches(current_) ? ctx_.get<Tensor::kXRows>()
                               : ctx_.get_of_pass<Tensor::kXRows, Tensor::kDyRows>();
  }

  /// Stores the oldest chunk to the rows of its pull, a lane each; returns the lane's row if it was
  /// the last chunk of it.
  __device__ __forceinline__ int store() {
    const int row = row_;
    const int at = place_of(row);
    const int chunk = store_.chunk;
    const int bytes = bytes_of(chunk);
    float factor = 1.0f;
    if constexpr (kKinds.weighs) factor = factor_of_row(row);
    if (chunk == chunks_ - 1) row_ = row_of(store_.pull + 1);  // for the next time
    ptx::mbarrier_wait(&full_[store_.buffer], store_.parity);
    if (kKinds.weighs && weighs_rows()) {
      store_scaled(buffers_ + store_.buffer * buffer_bytes_, bytes,
                   row != kNoRow ? ctx_.get<Tensor::kDyRows>() + offset_of(at) : nullptr,
                   chunk * kPullBytes, factor, lane_);
    } else if (row != kNoRow) {
      auto* to = reinterpret_cast<std::byte*>(target() + offset_of(at));
      ptx::bulk_store(to + chunk * kPullBytes, buffers_ + store_.buffer * buffer_bytes_, bytes);
    }
    if (in_ring() && chunk == chunks_ - 1 &&
        __any_sync(kWholeWarp, row != kNoRow && row == current_.last_row)) {
      zero_pad_rows(current_.last_row);
    }
    store_.advance(num_buffers_, chunks_);
    --under_way_;
    const bool is_row = !kKinds.saves || lane_ != kKeepingLane;
    return is_row && chunk == chunks_ - 1 ? row : kNoRow;
  }

  /// Whether rows of the current batch are multiplied on their way.
  __device__ __forceinline__ bool weighs_rows() const {
    return ctx_.view.probs == Probs::kAfter && !refetches(current_);
  }
  __device__ __forceinline__ float factor_of_row(int row) const {
    if (row == kNoRow || !weighs_rows()) return 1.0f;
    return factor_of_dy(ctx_.get<Tensor::kRowProbs>()[ctx_.row<Tensor::kRowProbs>(row)]);
  }

  __device__ __forceinline__ void begin_batch() {
    if (current_.pulls == 0 || lane_ != 0) return;
    trace_.note([&](TraceRecord& r) {
      const Task task = task_at(current_.task);
      r.stage = task.stage;
      r.expert = task.expert;
      r.tile = task.tile;
      r.launch = queues_.launch;
      r.taken = r.ready = r.begun = ptx::global_nanoseconds();
      r.begun_cycle = r.done_cycle = 0;
    });
  }

  __device__ __forceinline__ void next_batch() {
    if (lane_ == 0) {
      trace_.note([](TraceRecord& r) { r.done = r.sent = ptx::global_nanoseconds(); });
    }
    trace_.advance();
    load_.pull -= current_.pulls;
    store_.pull = 0;
    current_ = upcoming_;
    upcoming_ = read_batch();
    begin_batch();
  }

  /// Between stores that have landed and the signals that say so. By all lanes.
  __device__ __forceinline__ void fence_signals() const {
    if constexpr (kKinds.weighs || kKinds.ring) {  // all lanes have stored parts of a row
      ptx::fence_proxy_async();
      __syncwarp();
    }
    ptx::fence_proxy_async();
    __threadfence();
  }

  /// Signals each row.
  __device__ __forceinline__ void signal(const ChunkRows& rows) const {
    if (!may_signal(ctx_.fault_injection, {rows.stage, rows.tile})) return;
#pragma unroll 1
    for (int i = 0; i < kGroup; ++i) {
      const int row = rows.get(i);
      if (row == kNoRow) continue;
      const auto raise = [&](const Signal& s) { ptx::add_relaxed_gpu(ctx_.counter(s), s.amount); };
      if (is(rows.stage, Stage::kRedispatch) || is(rows.stage, Stage::kExpand)) {
        for_each_counter<kSignalsOf<Stage::kRedispatch>>([&](CounterKind kind) {
          if ((ctx_.view.stage(rows.stage).signals & bit_of(kind)) != 0) {
            raise(row_signal(ctx_.view, kind, row));
          }
        });
      } else {
        for_each_counter<kSignalsOf<Stage::kDispatch>>(
            [&](CounterKind kind) { raise(row_group_signal(ctx_.view, kind, row)); });
      }
    }
  }

  /// Nothing is under way any more; signals what is still unsignalled, and ends the life of the
  /// barriers: the memory is about to be used otherwise.
  __device__ __forceinline__ void end() {
    ptx::bulk_wait<0>();
    fence_signals();
    signal(unsignalled_);
    for (; under_way_ > 0; --under_way_, store_.advance(num_buffers_, chunks_)) {
      ptx::mbarrier_wait(&full_[store_.buffer], store_.parity);
    }
    __syncwarp();
    if (lane_ == 0) {
      for (int i = 0; i < num_buffers_; ++i) ptx::mbarrier_invalidate(&full_[i]);
      trace_.finish();
    }
  }

  const DeviceContext& ctx_;
  const LaunchQueues& queues_;
  const int dispatchers_;  // CTAs that dispatch
  const int warp_;
  const int lane_;
  std::uint8_t* buffers_;
  std::uint64_t* full_;
  const int token_bytes_;
  const int chunks_;  // of a token
  const int buffer_bytes_;
  const int num_buffers_;
  const bool keeps_tokens_;
  const bool in_ring_;
  std::int64_t next_task_;
  Tracer trace_;
  int next_pull_ = 0;  // of that task
  PullBatch current_;
  PullBatch upcoming_;
  int under_way_ = 0;  // chunks asked for and not yet stored
  int row_ = kNoRow;   // of the chunk to be stored next
  ChunkPosition load_;
  ChunkPosition store_;
  unsigned seen_ = 0;      // sources known to have published
  int roomy_ = -1;         // in a ring: experts up to this one have room
  ChunkRows unsignalled_;  // whose stores may still be under way
};

/// What the first `dispatchers` CTAs begin with. By all threads of the CTA.
template <DispatchKinds kKinds>
__device__ __forceinline__ void dispatch_tasks(const DeviceContext& ctx, const LaunchQueues& queues,
                                               int dispatchers, DispatchShared& shared) {
  if (threadIdx.x < 32 * kDispatchWarps) {
    DispatchWarp<kKinds>(ctx, queues, dispatchers, shared).run();
  }
  __syncthreads();
}

}  // namespace uniep::cuda
