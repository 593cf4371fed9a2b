#pragma once

#include <cstdint>

#include "cuda/refusal.h"
#include "layout/workspace.h"
#include "schedule/dependencies.h"
#include "schedule/queue.h"
#include "schedule/roles.h"
#include "uniep/bf16.h"

namespace uniep::cuda {

inline constexpr int kMaxRanks = 8;

/// How an expired wait reaches the host: written once, by the first waiter whose limit passed.
struct WaitFailure {
  int raised;   // 0; -1: being written; 1
  int refused;  // 1: a rank refused the call, and nothing else is said here
  int stage;
  int peer;
  int counter;  // CounterKind
  long long tile;
  unsigned expected;
  unsigned seen;
};

/// Addresses and bases of the counters that this rank waits for. A peer's copy of `published` and
/// `arrived` is found through its heap.
struct DeviceCounters {
  std::uint32_t* rows_ready;
  std::uint32_t* tile_done;
  std::uint32_t* expert_done;
  const std::uint32_t* rows_ready_base;
  const std::uint32_t* tile_done_base;
  const std::uint32_t* expert_done_base;
  const std::uint32_t* arrived_base;
  const std::uint32_t* published_base;  // [1]: passes before this one
};

/// LayerOptions::faults as the kernels of one pass on one rank see them; device/faults.cuh uses
/// them.
struct DeviceFaults {
  std::uint32_t max_delay_us = 0;
  std::uint32_t salt = 0;               // of the delays: differs by seed and rank ...
  const std::uint32_t* pass = nullptr;  // [1]: ... and pass
  int withhold_stage = -1;              // -1: this rank withholds nothing
  std::int64_t withhold_tile = 0;
};

struct TraceRecord;

/// Where tasks are recorded (device/trace.cuh): a row for each CTA, and behind them one for each
/// dispatching warp.
struct DeviceTrace {
  TraceRecord* records = nullptr;  // [rows, capacity]
  std::int32_t* counts = nullptr;  // [rows]: records so far
  std::int32_t capacity = 0;       // of a row; 0: nothing is recorded
};

/// What the kernels of one pass read and write on one rank: the device's counterpart of the CPU
/// backend's PassContext. Shapes as in layout/workspace.h; pointers that the pass has no use for
/// are null. Operands that the copy engine moves by tensor map are in PassMaps.
struct DeviceContext {
  PassView view;  // its arrays lie in device memory

  std::byte* heaps[kMaxRanks]{};  // symmetric memory, by rank
  SymmetricLayout symmetric;
  DeviceCounters counters{};
  WaitFailure* failure = nullptr;   // in host memory
  std::uint32_t* failed = nullptr;  // not 0 when `failure` was recorded; in this rank's memory
  std::uint32_t limit_ticks[kNumCounterKinds]{};  // of waits, by CounterKind, in units of 1024 ns
  CallState* calls = nullptr;                     // this rank's; null in tests without one
  DeviceFaults faults{};
  DeviceTrace trace{};

  bf16* dispatched = nullptr;  // where dispatch stores rows: x_rows or dy_rows
  float* row_probs = nullptr;  // forward writes, backward reads
  float* dprob_groups = nullptr;
  bf16* token_out = nullptr;  // out or dx
  float* dprobs_out = nullptr;
  // Weight gradients that are added to, fp32 or bf16 by kernel; null: overwritten, in bf16 through
  // a tensor map.
  void* main_dw1 = nullptr;
  void* main_dw2 = nullptr;

  template <class T>
  __device__ __forceinline__ T* at(int rank, std::int64_t offset) const {
    return reinterpret_cast<T*>(heaps[rank] + offset);
  }
};

/// The queues of one launch and who takes them (schedule/launches.h).
struct LaunchQueues {
  QueueView comm{};
  QueueView main{};
  int launch = 0;                   // launch_number of it
  std::uint32_t* ticket = nullptr;  // tasks of `main` that were taken; 0 when the launch begins
  Roles even{};                     // of its CTAs, under an even routing
};

}  // namespace uniep::cuda
