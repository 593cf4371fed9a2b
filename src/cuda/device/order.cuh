#pragma once

#include "cuda/device/grid_barrier.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/plan_kernels.h"
#include "cuda/ptx/sync.cuh"
#include "schedule/launches.h"
#include "schedule/queue.h"
#include "schedule/tile_order.h"
#include "schedule/tokens_in_place.h"

// The order of one pass on one rank, by all CTAs of one launch: what PassOrder and QueueTable make.
//
//   tiles    a warp per (wave, expert) finds where its block begins by looking at all experts, and
//            writes its tiles; token blocks count their slots
//   barrier
//   first    a warp per 32 rows: which of them belong to pulls that no earlier tile needs?
//   blocks   meanwhile a CTA per queue lists its blocks
//   barrier
//   pulls    a running sum of these gives every tile's place among the pulls
//   barrier
//   begins   a CTA per queue sums the draws before each of its blocks
//
// Pulls need no sort: those that a tile is the first to need stand in canonical order (source,
// token) as its rows do, since all of them are of one expert.

namespace uniep::cuda {

inline constexpr int kOrderWarps = 16;
inline constexpr int kOrderThreads = 32 * kOrderWarps;

/// What the threads of a CTA share.
struct OrderCta {
  Launch launch;  // of the queue at hand
  std::int64_t warp_sums[kOrderWarps];
  std::int32_t pulls;
};

/// `kTokenWaves`: tokens come in waves (token_waves.h).
template <bool kTokenWaves>
class OrderRoutine {
 public:
  __device__ OrderRoutine(const OrderArgs& args, OrderCta& cta)
      : v_(args.view),
        plan_(args.plan),
        o_(args.order),
        arrivals_(args.scratch.order_arrivals),
        cta_(cta),
        ok_(args.plan.status->ok() && !has_failed(args)) {}

  __device__ void run() {
    const bool has_queues = this_cta() >= first_queue_cta();
    const bool has_chunks = this_cta() < chunk_ctas();
    order_tiles();
    if (ok_) count_slots();
    // A barrier's counter is reset when all are past the next one; the last one's, by the next
    // launch ahead of its first barrier.
    reset(2);
    grid_sync(arrivals_);
    num_tiles_ = static_cast<int>(o_.tile_begin[v_.num_blocks()]);
    if (has_chunks) find_first_rows();
    grid_arrive(arrivals_ + 1);
    if (has_queues) for_each_queue([&](int q) { list_blocks(q); });  // nobody waits for these
    grid_wait(arrivals_ + 1);
    reset(0);
    if (has_chunks) order_pulls();
    grid_arrive(arrivals_ + 2);
    if (!has_queues) return;
    grid_wait(arrivals_ + 2);
    reset(1);
    for_each_queue([&](int q) { sum_draws(q); });
  }

 private:
  /// Behind a pass whose wait expired nothing may run that was put on the stream meanwhile: rows
  /// that never came would be added to gradients, and peers would take counters of the next pass
  /// for those that they wait for.
  static __device__ bool has_failed(const OrderArgs& args) {
    return args.failed != nullptr && ptx::load_relaxed_gpu(args.failed) != 0;
  }

  __device__ int this_cta() const { return static_cast<int>(blockIdx.x); }
  __device__ int ctas_of_grid() const { return static_cast<int>(gridDim.x); }
  // The last CTAs have queues, all others chunks of the rows; a single CTA has both.
  __device__ int queue_ctas() const {
    return clamp_to(o_.num_queues, 1, max_of(ctas_of_grid() - 1, 1));
  }
  __device__ int first_queue_cta() const { return ctas_of_grid() - queue_ctas(); }
  __device__ int chunk_ctas() const { return max_of(first_queue_cta(), 1); }

  template <class F>
  __device__ void for_each_queue(F&& f) const {
    for (int q = this_cta() - first_queue_cta(); q < o_.num_queues; q += queue_ctas()) f(q);
  }

  /// Zeroes a barrier. The last CTA does it, since it has queues and so passes all barriers.
  __device__ void reset(int barrier) const {
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) arrivals_[barrier] = 0;
  }
  __device__ int warps_of_grid() const { return ctas_of_grid() * kOrderWarps; }
  /// Warps of different CTAs have consecutive numbers, so that few of them spread over many SMs.
  __device__ int warp_of_grid() const { return warp_index() * ctas_of_grid() + this_cta(); }

  // ---- tiles ----

  __device__ int tiles_of(std::int64_t rows) const {
    return static_cast<int>(ceil_div<std::int64_t>(rows, v_.schedule.tile_m));
  }
  __device__ int wave_begin(int expert, int count, int wave) const {
    if constexpr (kTokenWaves) {
      return static_cast<int>(token_wave_begin(v_, expert, count, wave));
    }
    return static_cast<int>(uniep::wave_begin(v_, count, wave));
  }

  /// The first that is taken of the expert's tiles. A warp looks at 32 rows at a time, evenly
  /// spread over those that may be the first of the starting token or a later one.
  __device__ int starting_tile(int expert, std::int64_t rows) const {
    if constexpr (kTokenWaves) {
      return static_cast<int>(first_wave_begin(v_, expert)) % tiles_of(rows);
    }
    const std::int64_t token = starting_token(v_);
    if (token == 0) return 0;
    const TokenOrder order = token_order(v_);
    const RowOrigin* origin = v_.row_origin + v_.segment_begin[expert];
    std::int64_t low = 0;  // the row is among low to low + left
    std::int64_t left = rows;
    while (left > 0) {
      const std::int64_t step = ceil_div<std::int64_t>(left, 32);
      const std::int64_t probe = (lane_index() + 1) * step - 1;
      const RowOrigin at = probe < left ? origin[low + probe] : RowOrigin{};
      const bool before = probe < left && order.number(at.source, at.token) < token;
      const std::int64_t passed = __popc(__ballot_sync(kWholeWarp, before)) * step;
      low += passed;
      left = min_of<std::int64_t>(step - 1, left - passed);
    }
    return low == rows ? 0 : static_cast<int>(low / v_.schedule.tile_m);
  }

  /// The place of a wave's block of an expert.
  struct BlockPlace {
    int position;     // of the expert in expert_order
    int first_tile;   // of the block
    int total_tiles;  // of the pass
  };

  __device__ BlockPlace find_block(int wave, int expert) const {
    const std::int64_t rows = v_.tokens_per_expert[expert];
    BlockPlace at{0, 0, 0};
    for (int other = lane_index(); other < v_.num_local_experts; other += 32) {
      const std::int64_t other_rows = v_.tokens_per_expert[other];
      const int count = tiles_of(other_rows);
      const int begin = wave_begin(other, count, wave);
      at.total_tiles += count;
      at.first_tile += begin;  // in earlier waves
      if (stands_before(v_, other_rows, other, rows, expert)) {
        at.position += 1;
        at.first_tile += wave_begin(other, count, wave + 1) - begin;
      }
    }
    return {warp_sum(at.position), warp_sum(at.first_tile), warp_sum(at.total_tiles)};
  }

  __device__ void order_block(int wave, int expert) const {
    const BlockPlace at = find_block(wave, expert);
    if (lane_index() == 0) {
      o_.tile_begin[wave * v_.num_local_experts + at.position] = at.first_tile;
      if (wave == 0) {
        o_.expert_order[at.position] = expert;
        o_.dispatched_per_expert[expert] =
            is_dispatched(v_, expert) ? v_.tokens_per_expert[expert] : 0;
      }
      if (wave == 0 && expert == 0) o_.tile_begin[v_.num_blocks()] = at.total_tiles;
    }
    const std::int64_t rows = v_.tokens_per_expert[expert];
    const int count = tiles_of(rows);
    const int begin = wave_begin(expert, count, wave);
    const int end = wave_begin(expert, count, wave + 1);
    if (begin == end) return;
    const int start = starting_tile(expert, rows);
    const std::int64_t segment = v_.segment_begin[expert];
    const int tile_m = v_.schedule.tile_m;
    for (int i = begin + lane_index(); i < end; i += 32) {
      const std::int64_t first = static_cast<std::int64_t>((start + i) % count) * tile_m;
      const int position = at.first_tile + i - begin;
      o_.tiles[position] = {segment + first,
                            static_cast<std::int32_t>(min_of<std::int64_t>(tile_m, rows - first)),
                            expert};
      o_.tile_position[(segment + first) / tile_m] = position;
    }
  }

  __device__ void order_tiles() const {
    for (int i = warp_of_grid(); i < v_.num_blocks(); i += warps_of_grid()) {
      order_block(i / v_.num_local_experts, i % v_.num_local_experts);
    }
  }

  // ---- slots ----

  /// Slots of a token block at 32 peers from `first` on, one in each lane.
  __device__ int count_block_slots(std::int64_t begin, std::int64_t end, int first) const {
    constexpr int kAhead = 8;  // reads under way at a time
    int mine = 0;
    for (std::int64_t i = begin + lane_index(); i - lane_index() < end; i += 32 * kAhead) {
      std::int32_t ids[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) ids[j] = i + 32 * j < end ? v_.topk_ids[i + 32 * j] : -1;
#pragma unroll
      for (const std::int32_t id : ids) {
        const int peer = id < 0 ? -1 : v_.rank_of_expert(id) - first;
        for (int p = 0; p < min_of(32, v_.num_ranks - first); ++p) {
          const int slots = __popc(__ballot_sync(kWholeWarp, peer == p));
          if (lane_index() == p) mine += slots;
        }
      }
    }
    return mine;
  }

  /// Slots of shared experts, which have all of the rank's tokens, beside so many slots of others.
  __device__ int shared_slots(std::int64_t others) const {
    return static_cast<int>(others) / v_.topk * v_.shared_experts;
  }

  __device__ void count_slots() const {
    const std::int64_t slots = v_.tokens * v_.topk;
    const std::int64_t per_block = static_cast<std::int64_t>(v_.schedule.token_block) * v_.topk;
    // From the other end: the first warps have tiles to do.
    for (std::int64_t b = warps_of_grid() - 1 - warp_of_grid(); b < v_.num_token_blocks();
         b += warps_of_grid()) {
      const std::int64_t end = min_of<std::int64_t>((b + 1) * per_block, slots);
      for (int first = 0; first < v_.num_ranks; first += 32) {
        const int peer = first + lane_index();
        int mine = count_block_slots(b * per_block, end, first);
        if (peer == v_.rank) mine += shared_slots(end - b * per_block);
        if (peer < v_.num_ranks) o_.slots_to_peer[b * v_.num_ranks + peer] = mine;
      }
    }
  }

  // ---- pulls ----

  __device__ bool dedup() const { return v_.schedule.dispatch_wire == DispatchWire::kDedup; }

  /// Whether this row is the first of its pull's that is taken. The others are looked up several at
  /// a time: one by one, each would wait twice for the way to memory.
  __device__ bool is_first(std::int64_t row, int position) const {
    if (!dedup()) return true;
    constexpr int kAhead = 8;
    const Pull pull = plan_.pulls[plan_.pull_of_row[row]];
    const auto tile_m = static_cast<std::uint32_t>(v_.schedule.tile_m);
    const int rows = dispatched_rows(v_, pull);
    for (int first = 0; first < rows; first += kAhead) {
      std::int64_t others[kAhead];
#pragma unroll
      for (int c = 0; c < kAhead; ++c) {
        const int at = min_of(first + c, rows - 1);
        others[c] = plan_.pull_rows[pull.first_row + at];
      }
      bool is_behind = false;  // one of these
#pragma unroll
      for (int c = 0; c < kAhead; ++c) {
        const int taken = o_.tile_position[static_cast<std::uint32_t>(others[c]) / tile_m];
        is_behind |= taken < position || (taken == position && others[c] < row);
      }
      if (is_behind) return false;
    }
    return true;
  }

  // A *chunk* is up to 32 rows of a tile: what a warp looks at. Consecutive chunks belong to one
  // CTA, so that sums over CTAs and within them make the running sum over all.
  __device__ int chunks_a_tile() const { return cuda::chunks_a_tile(v_.schedule); }
  __device__ int first_chunk_of_cta(int cta) const {
    const std::int64_t chunks = static_cast<std::int64_t>(num_tiles_) * chunks_a_tile();
    return static_cast<int>(chunks * cta / chunk_ctas());
  }
  __device__ int cta_begin() const { return first_chunk_of_cta(this_cta()); }
  __device__ int cta_end() const { return first_chunk_of_cta(this_cta() + 1); }

  /// This lane's row of the chunk, if dispatch brings it; or -1.
  __device__ std::int64_t row_of_chunk(int chunk) const {
    const Tile tile = o_.tiles[chunk / chunks_a_tile()];
    if (!is_dispatched(v_, tile.expert)) return -1;
    const int r = chunk % chunks_a_tile() * 32 + lane_index();
    return r < tile.rows ? tile.first_row + r : -1;
  }

  __device__ void find_first_rows() const {
    if (threadIdx.x == 0) cta_.pulls = 0;
    __syncthreads();
    int sum = 0;
    for (int p = cta_begin() + warp_index(); p < cta_end(); p += kOrderWarps) {
      const std::int64_t row = row_of_chunk(p);
      const unsigned mask =
          __ballot_sync(kWholeWarp, row >= 0 && is_first(row, p / chunks_a_tile()));
      if (lane_index() == 0) o_.first_rows[p] = mask;
      sum += __popc(mask);
    }
    if (lane_index() == 0 && sum != 0) atomicAdd(&cta_.pulls, sum);
    __syncthreads();
    if (threadIdx.x == 0) o_.cta_pulls[blockIdx.x] = cta_.pulls;
  }

  /// The number of pulls before each of the CTA's chunks, and before the next CTA's. By warp 0.
  __device__ void sum_chunks() const {
    int before = 0;
    for (int c = lane_index(); c < this_cta(); c += 32) {
      before += o_.cta_pulls[c];
    }
    before = warp_sum(before);
    for (int p = cta_begin() + lane_index(); p - lane_index() < cta_end(); p += 32) {
      const int pulls = p < cta_end() ? __popc(o_.first_rows[p]) : 0;
      const int up_to = warp_inclusive_sum(pulls);
      if (p < cta_end()) o_.pulls_before[p] = before + up_to - pulls;
      before += __shfl_sync(kWholeWarp, up_to, 31);
    }
    if (lane_index() == 0) cta_.pulls = before;
  }

  __device__ Pull pull_for(std::int64_t row) const {
    Pull pull = plan_.pulls[plan_.pull_of_row[row]];
    if (dedup()) {
      pull.num_rows = dispatched_rows(v_, pull);
      return pull;
    }
    while (plan_.pull_rows[pull.first_row] != row) ++pull.first_row;
    pull.num_rows = 1;
    return pull;
  }

  __device__ void write_pulls(int chunk) const {
    const unsigned mask = o_.first_rows[chunk];
    if ((mask >> lane_index() & 1) == 0) return;
    o_.pulls[o_.pulls_before[chunk] + __popc(mask & lanes_below(lane_index()))] =
        pull_for(row_of_chunk(chunk));
  }

  __device__ void order_pulls() const {
    if (warp_index() == 0) sum_chunks();
    __syncthreads();
    const bool last = this_cta() == chunk_ctas() - 1;
    for (int q = threadIdx.x; q <= v_.num_blocks(); q += kOrderThreads) {
      const int tile = static_cast<int>(o_.tile_begin[q]);
      const int chunk = tile * chunks_a_tile();
      if (chunk >= cta_begin() && chunk < cta_end()) o_.pull_begin[q] = o_.pulls_before[chunk];
      if (last && tile == num_tiles_) o_.pull_begin[q] = cta_.pulls;
    }
    for (int p = cta_begin() + warp_index(); p < cta_end(); p += kOrderWarps) write_pulls(p);
  }

  // ---- queues ----

  /// Sum over the CTA's threads before this one; *total: over all of them.
  __device__ std::int64_t sum_before(std::int64_t value, std::int64_t* total) const {
    const std::int64_t up_to = warp_inclusive_sum(value);
    if (lane_index() == 31) cta_.warp_sums[warp_index()] = up_to;
    __syncthreads();
    std::int64_t before = 0;
    *total = 0;
    for (int w = 0; w < kOrderWarps; ++w) {
      if (w < warp_index()) before += cta_.warp_sums[w];
      *total += cta_.warp_sums[w];
    }
    __syncthreads();
    return before + up_to - value;
  }

  /// All at a time, whatever their tracks: finding a block's place takes many divisions.
  __device__ void list_blocks(int q) const {
    if (threadIdx.x == 0) {
      make_launch(v_, q / 2, launch_lag(v_), cta_.launch);
    }
    __syncthreads();
    const TrackList& tracks = q % 2 == 0 ? cta_.launch.comm : cta_.launch.main;
    QueueBlock* blocks = o_.blocks_of(q);
    for (int n = threadIdx.x; n < o_.queue_size(q); n += kOrderThreads) {
      int track = 0;
      int i = n;
      for (; i >= tracks.tracks[track].count; ++track) i -= tracks.tracks[track].count;
      blocks[queue_position(tracks, track, i)] = queue_block(v_, tracks, track, i);
    }
    __syncthreads();  // the tracks are used
  }

  __device__ void sum_draws(int q) const {
    const QueueBlock* blocks = o_.blocks_of(q);
    std::int64_t* begin = o_.begin_of(q);
    const int count = o_.queue_size(q);
    std::int64_t before = 0;
    for (int first = 0; first < count; first += kOrderThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      // There are none then, not even those that do not depend on the plan's rows.
      const bool any = i < count && ok_;
      const std::int64_t draws = any ? block_draws(v_, blocks[i]) : 0;
      std::int64_t total;
      const std::int64_t at = before + sum_before(draws, &total);
      if (i < count) begin[i] = at;
      before += total;
    }
    if (threadIdx.x == 0) begin[count] = before;
  }

  const PassView& v_;
  const DevicePlan& plan_;
  const DeviceOrder& o_;
  std::uint32_t* const arrivals_;
  OrderCta& cta_;
  const bool ok_;
  int num_tiles_ = 0;
};

}  // namespace uniep::cuda
