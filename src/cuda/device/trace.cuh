#pragma once

#include <cstdint>

#include "cuda/device/context.cuh"
#include "cuda/device/trace_record.h"

namespace uniep::cuda {

/// f(record number `index` of a row); what finds no room is not recorded.
template <class F>
__device__ __forceinline__ void note_record(const DeviceTrace& trace, int row, int index, F&& f) {
  if (index < trace.capacity) f(trace.records[std::int64_t{row} * trace.capacity + index]);
}

/// A role's walk through the records of its row, one a task. All roles of a row begin with the same
/// record. The count of records says which, but only until the first role comes to its end, where
/// others may still have to begin.
class Tracer {
 public:
  __device__ __forceinline__ Tracer(const DeviceTrace& trace, int row, int first_record)
      : trace_(trace), row_(row), next_(first_record) {}

  /// The tracer of a row that has one role only.
  __device__ __forceinline__ Tracer(const DeviceTrace& trace, int row)
      : Tracer(trace, row, first_record(trace, row)) {}

  static __device__ __forceinline__ int first_record(const DeviceTrace& trace, int row) {
    return trace.capacity > 0 ? trace.counts[row] : 0;
  }

  /// f(record of the task at hand).
  template <class F>
  __device__ __forceinline__ void note(F&& f) const {
    note_record(trace_, row_, next_, f);
  }
  __device__ __forceinline__ void advance() { ++next_; }

  /// Keeps the number of records for the next launch. By one role of the row.
  __device__ __forceinline__ void finish() const {
    if (trace_.capacity > 0)
      trace_.counts[row_] = next_ < trace_.capacity ? next_ : trace_.capacity;
  }

 private:
  const DeviceTrace& trace_;
  int row_;
  int next_;
};

}  // namespace uniep::cuda
