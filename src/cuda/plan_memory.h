#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/expert_numbers.h"
#include "cuda/device/context.cuh"
#include "layout/workspace.h"
#include "plan/routing_fault.h"
#include "schedule/launches.h"
#include "schedule/queue.h"
#include "uniep/problem.h"
#include "uniep/routing_plan.h"

// A routing plan and its order in device memory: the arrays of RoutingPlan and PassOrder, element
// for element, made by kernels (kernels/plan.cu, kernels/order.cu) without the host knowing a
// count. Each is a layout, which states every array once, and a struct of the pointers that it
// gives.

namespace uniep::cuda {

/// The experts of all ranks, each rank's shared ones too: counts of each live in the shared memory
/// of a CTA.
inline constexpr int kMaxExperts = 2048;
/// CTAs that a plan or order kernel is launched with at most.
inline constexpr int kMaxPlanCtas = 256;

/// Why the backend cannot have a layer for this problem, or nothing where it can.
std::optional<std::string> unsupported_reason(const Problem& problem, int num_ranks);

/// Whether a plan can be used. A plan that cannot is empty: no rows, and no tasks in any queue.
struct PlanStatus {
  RoutingFault fault;          // the caller's
  std::uint32_t expired = 0;   // a peer did not come in time
  std::uint32_t reserved = 0;  // keeps the size a multiple of 8

  UNIEP_HD bool ok() const { return fault.kind == RoutingFault::Kind::kNone && expired == 0; }
};

/// What the host looks at after synchronising: the first fault and the first expired wait since it
/// last cleared them. Memory that the device writes and the host sees.
struct PlanReport {
  RoutingFault fault;
  WaitFailure wait{};  // `counter` is -1: flags of the exchange are none of a pass's counters
};

/// Throws the CPU's Error for what the report holds, if anything.
void throw_if_any(const PlanReport& report, const Problem& problem, int rank, int num_ranks,
                  std::int64_t limit_ms);

struct DevicePlanLayout {
  std::int64_t status;             // PlanStatus [1]
  std::int64_t num_pulls;          // int64 [1]
  std::int64_t tokens_per_rank;    // int64 [ranks]
  std::int64_t tokens_per_expert;  // int64 [local experts]
  std::int64_t segment_begin;      // int64 [local experts + 1]
  std::int64_t topk_ids;           // int32 [max_tokens, K]
  std::int64_t row_origin;         // RowOrigin [capacity]
  std::int64_t pulls;              // Pull [most pulls]
  std::int64_t pull_rows;          // int64 [capacity]
  std::int64_t pull_of_row;        // int32 [capacity]
  std::int64_t num_pages;          // int32 [1]
  std::int64_t pages;              // int32 [most pages]
  std::int64_t bytes;

  DevicePlanLayout(const Problem& p, int num_ranks) {
    const std::int64_t capacity = capacity_rows(p, num_ranks);
    const int experts = expert_numbers(p, num_ranks).of_rank();
    detail::Ranges r;
    status = r.take<PlanStatus>(1);
    num_pulls = r.take<std::int64_t>(1);
    tokens_per_rank = r.take<std::int64_t>(num_ranks);
    tokens_per_expert = r.take<std::int64_t>(experts);
    segment_begin = r.take<std::int64_t>(experts + 1);
    topk_ids = r.take<std::int32_t>(PlanExchangeLayout(p, num_ranks).slots_per_rank);
    row_origin = r.take<RowOrigin>(capacity);
    pulls = r.take<Pull>(min_of<std::int64_t>(capacity, num_ranks * p.max_tokens));
    pull_rows = r.take<std::int64_t>(capacity);
    pull_of_row = r.take<std::int32_t>(capacity);
    num_pages = r.take<std::int32_t>(1);
    pages = r.take<std::int32_t>(
        page_shape(p).pages_of(capacity, most_received(p, num_ranks, capacity)));
    bytes = r.bytes();
  }
};

/// See RoutingPlan for what each array holds. Pad rows have an origin, but no pull.
struct DevicePlan {
  PlanStatus* status = nullptr;
  std::int64_t* num_pulls = nullptr;
  std::int64_t* tokens_per_rank = nullptr;
  std::int64_t* tokens_per_expert = nullptr;
  std::int64_t* segment_begin = nullptr;
  std::int32_t* topk_ids = nullptr;  // this rank's
  RowOrigin* row_origin = nullptr;
  Pull* pulls = nullptr;
  std::int64_t* pull_rows = nullptr;
  std::int32_t* pull_of_row = nullptr;  // index of the pull that fills the row
  std::int32_t* num_pages = nullptr;    // of a row pool that it holds now
  std::int32_t* pages = nullptr;        // PassView::pages
};

/// The plan in memory that starts at `base`.
DevicePlan device_plan(std::byte* base, const DevicePlanLayout& layout);

/// Chunks of up to 32 rows, a warp's share, that the order kernel cuts a tile into.
inline UNIEP_HD int chunks_a_tile(const Schedule& s) { return ceil_div(s.tile_m, 32); }

/// Launches have two queues each: communication, then main.
inline constexpr int kMaxQueues = 2 * kMaxLaunches;

struct DeviceOrderLayout {
  std::int64_t expert_order;           // int32 [local experts]
  std::int64_t dispatched_per_expert;  // int64 [local experts]
  std::int64_t tiles;                  // Tile [most tiles]
  std::int64_t tile_begin;             // int64 [blocks + 1]
  std::int64_t pulls;                  // Pull [capacity]
  std::int64_t pull_begin;             // int64 [blocks + 1]
  std::int64_t slots_to_peer;          // int64 [token blocks, ranks]
  std::int64_t queue_blocks;           // QueueBlock [of all queues]
  std::int64_t queue_begin;            // int64 [of all queues, one more each]
  // Used by the kernel alone.
  std::int64_t tile_position;  // int32 [most tiles]: of the tile that holds row i * tile_m
  std::int64_t first_rows;     // uint32 [most chunks]: rows that bring pulls first needed here
  std::int64_t pulls_before;   // int32 [most chunks]: such pulls of earlier chunks
  std::int64_t cta_pulls;      // int32 [kMaxPlanCtas]
  std::int64_t bytes;

  int num_queues = 0;
  std::int32_t queue_first[kMaxQueues + 1] = {};  // each queue's first block in queue_blocks

  DeviceOrderLayout(const Problem& p, int num_ranks, Pass pass, const Schedule& schedule,
                    PassPart part = PassPart::kWhole);
};

/// See PassView for what each array holds.
struct DeviceOrder {
  std::int32_t* expert_order = nullptr;
  std::int64_t* dispatched_per_expert = nullptr;
  Tile* tiles = nullptr;
  std::int64_t* tile_begin = nullptr;
  Pull* pulls = nullptr;
  std::int64_t* pull_begin = nullptr;
  std::int64_t* slots_to_peer = nullptr;
  QueueBlock* queue_blocks = nullptr;
  std::int64_t* queue_begin = nullptr;

  std::int32_t* tile_position = nullptr;
  std::uint32_t* first_rows = nullptr;
  std::int32_t* pulls_before = nullptr;
  std::int32_t* cta_pulls = nullptr;

  int num_queues = 0;
  std::int32_t queue_first[kMaxQueues + 1] = {};

  UNIEP_HD int queue_size(int queue) const { return queue_first[queue + 1] - queue_first[queue]; }
  UNIEP_HD QueueBlock* blocks_of(int queue) const { return queue_blocks + queue_first[queue]; }
  UNIEP_HD std::int64_t* begin_of(int queue) const {
    return queue_begin + queue_first[queue] + queue;
  }
  UNIEP_HD QueueView queue(int queue) const {
    return {blocks_of(queue), begin_of(queue), queue_size(queue)};
  }
  UNIEP_HD QueueView comm_queue(int launch) const { return queue(2 * launch); }
  UNIEP_HD QueueView main_queue(int launch) const { return queue(2 * launch + 1); }
};

/// Enough for the order of a pass under any schedule that the CUDA backend runs.
std::int64_t most_order_bytes(const Problem& p, int num_ranks);

/// The order in memory that starts at `base`.
DeviceOrder device_order(std::byte* base, const DeviceOrderLayout& layout);

/// A view whose pointers are device memory: for kernels. `own_tokens` is what the host knows; every
/// count that depends on the routing stays on the device.
PassView make_pass_view(const Problem& problem, int rank, int num_ranks, std::int64_t own_tokens,
                        const DevicePlan& plan, const DeviceOrder& order, Pass pass,
                        const Schedule& schedule, PassPart part = PassPart::kWhole);

/// What plan and order kernels of one layer keep from launch to launch; zeroed once. Launches that
/// share it run one after another (on one stream).
struct PlanScratchLayout {
  std::int64_t epoch;           // uint32 [1]: plans made
  std::int64_t failed;          // uint32 [1]: a wait expired; the group is unusable
  std::int64_t plan_arrivals;   // uint32 [2]: CTAs at the plan's barrier, by epoch % 2
  std::int64_t order_arrivals;  // uint32 [3]: CTAs at each of the order's barriers
  std::int64_t first_bad;       // uint64 [2]: ~(index of the first impossible slot), or 0
  std::int64_t totals;          // uint32 [2, ranks * local experts + ranks]: rows of each expert of
                                // every rank, tokens of every rank
  std::int64_t cta_counts;      // uint32 [kMaxPlanCtas, local experts + 2]
  std::int64_t bytes;

  PlanScratchLayout(const Problem& p, int num_ranks) {
    detail::Ranges r;
    epoch = r.take<std::uint32_t>(1);
    failed = r.take<std::uint32_t>(1);
    plan_arrivals = r.take<std::uint32_t>(2);
    order_arrivals = r.take<std::uint32_t>(3);
    first_bad = r.take<std::uint64_t>(2);
    const int experts = expert_numbers(p, num_ranks).of_rank();
    totals = r.take<std::uint32_t>(2 * (num_ranks * experts + num_ranks));
    cta_counts = r.take<std::uint32_t>(kMaxPlanCtas * (experts + 2));
    bytes = r.bytes();
  }
};

struct PlanScratch {
  std::uint32_t* epoch = nullptr;
  std::uint32_t* failed = nullptr;
  std::uint32_t* plan_arrivals = nullptr;
  std::uint32_t* order_arrivals = nullptr;
  unsigned long long* first_bad = nullptr;  // the type that atomicMax takes
  std::uint32_t* totals = nullptr;
  std::uint32_t* cta_counts = nullptr;
};

PlanScratch plan_scratch(std::byte* base, const PlanScratchLayout& layout);

}  // namespace uniep::cuda
