#include "cuda/call_protocol.h"

#include <atomic>
#include <cstring>

#include "base/check.h"
#include "base/cuda/check_cuda.h"
#include "cuda/pass_kernels.h"
#include "cuda/wait_failure.h"

namespace uniep::cuda {
namespace {

bool raised(const WaitFailure& w) {
  // The device may be writing it, and has written the rest before.
  const bool is = *static_cast<const volatile int*>(&w.raised) == 1;
  std::atomic_thread_fence(std::memory_order_acquire);
  return is;
}

/// Whatever kernels run meanwhile.
Refusal read_refusal(const Refusal* from) {
  Refusal refusal;
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "make a stream");
  cudaError_t result = cudaMemcpyAsync(&refusal, from, sizeof(refusal), cudaMemcpyDefault, stream);
  if (result == cudaSuccess) result = cudaStreamSynchronize(stream);
  ignore_cuda(cudaStreamDestroy(stream));
  check_cuda(result, "read why a rank refused");
  return refusal;
}

}  // namespace

CallProtocol::CallProtocol(const LayerGroup& group, cudaStream_t own_stream)
    : group_(group), streams_(own_stream), faults_(group, report_.get()->fault) {}

void CallProtocol::begin(const CallPlan& call, std::optional<void*> named) {
  throw_if_failed();
  streams_.begin_call(named);
  counted_ = false;
  if (call.plan == nullptr || captured()) return;
  faults_.throw_if_unusable(*call.plan, call.counts_rows, streams_);
}

void CallProtocol::synchronize() {
  streams_.require_no_capture("synchronize");
  streams_.synchronize();
  throw_if_failed();
  faults_.throw_if_untold(streams_);
}

/// What has failed for good, as every later call says.
void CallProtocol::throw_if_failed() const {
  if (refused_) throw *refused_;
  const WaitFailure& w = *failure();
  if (raised(w)) {
    throw w.refused != 0 ? refusal_of_peer() : pass_wait_error(w, group_.rank(), group_.limit_ms());
  }
  const PlanReport& plans = *report();
  if (!raised(plans.wait)) return;
  if (plans.wait.refused != 0) throw refusal_of_peer();
  throw_if_any(plans, group_.problem(), group_.rank(), group_.size(), group_.limit_ms());
}

Error CallProtocol::refusal_of_peer() const {
  const UncapturedScope scope;  // it may be told to a call that is captured
  const Refusal refusal = read_refusal(&group_.call_state(group_.rank())->refusal);
  return Error(static_cast<ErrorCode>(refusal.code), refusal.sentence);
}

/// Throws why this rank will not take part in the call. Where nobody waits for it, since the group
/// is this rank or nothing runs yet, the layer stays usable.
void CallProtocol::refuse(const Error& error) {
  const Error named(error.code(), cat("rank ", group_.rank(), ": ", error.what()));
  if (group_.size() == 1 || captured()) throw named;
  tell_all(named);
  refused_ = named;
  throw named;
}

/// Waits until all ranks have been told: this one may go away next.
void CallProtocol::tell_all(const Error& error) const {
  Refusal refusal;
  refusal.call = counted_ ? 0 : 1;
  refusal.code = static_cast<std::int32_t>(error.code());
  std::strncpy(refusal.sentence, error.what(), sizeof(refusal.sentence) - 1);
  CallStates calls{.by_rank = {}, .num_ranks = group_.size()};
  for (int r = 0; r < group_.size(); ++r) calls.by_rank[r] = group_.call_state(r);
  // If the device fails, peers' waits expire: there is nothing left to tell them by.
  if (launch_refuse(calls, group_.rank(), refusal, stream()) == cudaSuccess) {
    ignore_cuda(cudaStreamSynchronize(stream()));
  }
}

}  // namespace uniep::cuda
