#pragma once

#include <cstdint>

#include "base/activation.h"
#include "base/rank_limits.h"
#include "cuda/erf_coefficients.h"
#include "cuda/refusal.h"
#include "layout/tensor_table.h"
#include "schedule/dependencies.h"
#include "schedule/queue.h"
#include "schedule/roles.h"
#include "schedule/saved_rows.h"
#include "schedule/tokens_in_place.h"

namespace uniep::cuda {

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

/// This rank's counters, by CounterKind, and where they stood when the pass began. Those of kSource
/// rise by one a pass on every rank, and have one base: the passes before this one.
struct DeviceCounters {
  std::uint32_t* first[kNumCounterKinds];
  std::uint32_t* base[kNumCounterKinds];
};

/// A rank as its peers reach it: its symmetric memory, as mapped here.
class Peer {
 public:
  __device__ __forceinline__ Peer(std::byte* memory, const SymmetricLayout& layout)
      : memory_(memory), layout_(layout) {}

  template <Tensor t>
  __device__ __forceinline__ TypeOf<t>* get() const {
    return reinterpret_cast<TypeOf<t>*>(memory_ + layout_[t]);
  }
  __device__ __forceinline__ std::uint32_t* counter(const Signal& s) const {
    return reinterpret_cast<std::uint32_t*>(memory_ + layout_[s.kind]) + s.index;
  }

 private:
  std::byte* memory_;
  const SymmetricLayout& layout_;
};

/// LayerOptions::fault_injection as the kernels of one pass on one rank see them;
/// device/fault_injection.cuh uses them.
struct DeviceFaultInjection {
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
/// backend's PassContext. Operands that the copy engine moves by tensor map are in PassMaps.
struct DeviceContext {
  PassView view;  // its arrays lie in device memory

  std::byte* heaps[kMaxCudaRanks]{};  // symmetric memory, by rank
  SymmetricLayout symmetric;
  DeviceCounters counters{};
  WaitFailure* failure = nullptr;   // in host memory
  std::uint32_t* failed = nullptr;  // not 0 when `failure` was recorded; in this rank's memory
  std::uint32_t limit_ticks[kNumCounterKinds]{};  // of waits, by CounterKind, in units of 1024 ns
  CallState* calls = nullptr;                     // this rank's; null in tests without one
  DeviceFaultInjection fault_injection{};
  DeviceTrace trace{};

  TensorTable tensors{};
  // Weight gradients that are added to, fp32 or bf16 by kernel; null: overwritten, in bf16 through
  // a tensor map.
  void* main_dw1 = nullptr;
  void* main_dw2 = nullptr;
  void* main_db1 = nullptr;
  void* main_db2 = nullptr;
  /// A bit for each stage: the matrices of this rank's own experts, which the stage reads or whose
  /// gradients it writes, are [in, out].
  std::uint32_t in_out = 0;
  Limits limits{};  // of the activation, if it has any: parameters of a kernel take no registers
  ErfCoefficients erf{};

  template <Tensor t>
  __device__ __forceinline__ TypeOf<t>* get() const {
    return tensors.get<t>();
  }
  /// `forward` or `backward`, whichever the pass has.
  template <Tensor forward, Tensor backward>
  __device__ __forceinline__ TypeOf<forward>* get_of_pass() const {
    return view.pass == Pass::kForward ? get<forward>() : get<backward>();
  }

  /// Whether the stage finds the expert's matrix, or leaves its gradient, as [in, out].
  __device__ __forceinline__ bool is_in_out(Stage stage, int expert) const {
    return (in_out >> static_cast<int>(stage) & 1) != 0 && !view.is_shared(expert);
  }

  /// The row of that tensor that is row number `row` of the plan.
  template <Tensor t>
  __device__ __forceinline__ std::int64_t row(std::int64_t row) const {
    return row_in<t>(view, row);
  }

  __device__ __forceinline__ Peer peer(int rank) const { return {heaps[rank], symmetric}; }

  /// The counter that a signal goes to.
  __device__ __forceinline__ std::uint32_t* counter(const Signal& s) const {
    return is_symmetric(s.kind) ? peer(s.rank).counter(s)
                                : counters.first[static_cast<int>(s.kind)] + s.index;
  }
};

/// The queues of one launch and who takes them (schedule/launches.h).
struct LaunchQueues {
  QueueView comm{};
  QueueView main{};
  int launch = 0;                  // launch_number of it
  std::uint32_t* drawn = nullptr;  // draws taken of `main`; 0 when the launch begins
  Roles even{};                    // of its CTAs, under an even routing
};

}  // namespace uniep::cuda
