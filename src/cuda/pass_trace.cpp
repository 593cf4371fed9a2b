#include "cuda/pass_trace.h"

#include <algorithm>
#include <utility>

#include "base/cuda/check_cuda.h"
#include "cuda/device/dispatch_shape.h"

namespace uniep::cuda {
namespace {

constexpr int kPassNote = 0, kCtasNote = 1, kNotes = 2;

/// The events of one row. A task that was taken while the row was still busy with the one before
/// waited for nothing until that was done.
void append_events(std::vector<TimelineEvent>& events, std::span<const TraceRecord> records,
                   int worker, int processor, Pass pass, std::span<const std::int32_t> experts) {
  std::uint64_t free = 0;
  for (const TraceRecord& r : records) {
    const std::uint64_t begin = std::min(std::max(r.taken, free), r.begun);
    events.push_back({.pass = pass,
                      .stage = r.stage,
                      .worker = worker,
                      .processor = processor,
                      .launch = r.launch,
                      .expert = r.expert < 0 ? -1 : experts[static_cast<std::size_t>(r.expert)],
                      .tile = r.tile,
                      .begin_ns = static_cast<std::int64_t>(begin),
                      .ready_ns = static_cast<std::int64_t>(r.begun),
                      .end_ns = static_cast<std::int64_t>(r.done),
                      .cycles = static_cast<std::int64_t>(r.done_cycle - r.begun_cycle)});
    free = r.done;
  }
}

}  // namespace

PassTrace::PassTrace(int sms, int tasks_per_row, std::vector<std::int32_t> experts)
    : rows_(sms * (1 + kDispatchWarps)),
      capacity_(tasks_per_row),
      experts_(std::move(experts)),
      records_(std::int64_t{rows_} * capacity_ * static_cast<std::int64_t>(sizeof(TraceRecord))),
      counts_(rows_ + kNotes) {
  ensure(sms <= 255, "a trace of ", sms, " SMs");  // see `note`
}

DeviceTrace PassTrace::device() const {
  return {.records = reinterpret_cast<TraceRecord*>(records_.data()),
          .counts = counts_.data(),
          .capacity = capacity_};
}

void PassTrace::forget(cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(counts_.data(), 0,
                             static_cast<std::size_t>(rows_) * sizeof(std::int32_t), stream),
             "clear the trace");
}

void PassTrace::note(int index, int value, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(counts_.data() + rows_ + index, value, sizeof(std::int32_t), stream),
             "name the traced pass");
}

void PassTrace::start(Pass pass, int ctas, cudaStream_t stream, bool captured) {
  forget(stream);
  note(kPassNote, static_cast<int>(pass), stream);
  note(kCtasNote, ctas, stream);
  pending_ = true;
  in_graphs_ = in_graphs_ || captured;
}

std::vector<TimelineEvent> PassTrace::take(cudaStream_t stream) {
  if (!pending_) return {};
  pending_ = in_graphs_;
  check_cuda(cudaStreamSynchronize(stream), "wait for the trace");
  const std::vector<std::int32_t> counts = counts_.to_host();
  const auto noted = [&](int index) {
    return counts[static_cast<std::size_t>(rows_ + index)] & 0xff;
  };
  const auto pass = static_cast<Pass>(noted(kPassNote));
  const int ctas = noted(kCtasNote);
  forget(stream);
  std::vector<TimelineEvent> events;
  std::vector<TraceRecord> records;
  for (int row = 0; row < rows_; ++row) {
    const auto count = static_cast<std::size_t>(counts[static_cast<std::size_t>(row)]);
    if (count == 0) continue;
    records.resize(count);
    const std::byte* from = records_.data() + std::int64_t{row} * capacity_ *
                                                  static_cast<std::int64_t>(sizeof(TraceRecord));
    check_cuda(
        cudaMemcpy(records.data(), from, count * sizeof(TraceRecord), cudaMemcpyDeviceToHost),
        "copy the trace to the host");
    const int cta = row < ctas ? row : (row - ctas) / kDispatchWarps;
    append_events(events, records, row, cta, pass, experts_);
  }
  return events;
}

PassStats stage_sums(std::span<const TimelineEvent> events) {
  PassStats stats;
  for (const TimelineEvent& e : events) {
    StageStats& stage = stats[e.stage];
    ++stage.tasks;
    stage.busy_s += 1e-9 * static_cast<double>(e.end_ns - e.ready_ns);
    stage.wait_s += 1e-9 * static_cast<double>(e.ready_ns - e.begin_ns);
  }
  return stats;
}

}  // namespace uniep::cuda
