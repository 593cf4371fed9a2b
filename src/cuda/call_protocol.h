#pragma once

#include <exception>
#include <optional>

#include "cuda/host_visible.h"
#include "cuda/layer_group.h"
#include "cuda/routing_faults.h"
#include "cuda/stream_order.h"

namespace uniep::cuda {

/// The plan of a call, if it has one.
struct CallPlan {
  const RoutingPlan* plan = nullptr;
  /// The call asks for the plan's rows, and so waits for it. Where it has a fault, that is thrown
  /// ahead of the call, and refuses nothing.
  bool counts_rows = false;
};

/// What the calls of a layer have in common, besides their work. Ahead of a call, what has failed
/// before is thrown, and the call is put behind the others. If it fails before its launches are all
/// made, the other ranks are told. docs/counters.md says why it must be so.
class CallProtocol {
 public:
  /// `own_stream`: of calls that name none. `group` outlives this.
  CallProtocol(const LayerGroup& group, cudaStream_t own_stream);

  /// Begins a call, on the stream that it `named`.
  void begin(const CallPlan& call, std::optional<void*> named);

  /// Does the work of a collective call, after `begin`. What goes wrong, other ranks must hear of.
  template <class Body>
  auto together(const Body& body) {
    try {
      return body();
    } catch (const Error& error) {
      refuse(error);
    } catch (const std::exception& error) {
      refuse(Error(ErrorCode::kInternal, error.what()));
    }
  }

  /// The kernel that counts the call at hand on the device was launched.
  void counted() { counted_ = true; }

  /// Waits until all calls are done, and throws what went wrong.
  void synchronize();

  std::int64_t number_plan() { return faults_.number_plan(streams_); }
  const std::shared_ptr<ToldFaults>& told_faults() const { return faults_.told(); }
  const StreamOrder& streams() const { return streams_; }
  cudaStream_t stream() const { return streams_.stream(); }
  bool captured() const { return streams_.captured(); }

  // Where kernels say what went wrong.
  WaitFailure* failure() const { return failure_.get(); }  ///< of passes
  PlanReport* report() const { return report_.get(); }     ///< of plans

 private:
  void throw_if_failed() const;
  Error refusal_of_peer() const;
  [[noreturn]] void refuse(const Error& error);
  void tell_all(const Error& error) const;

  const LayerGroup& group_;
  const HostVisible<WaitFailure> failure_;
  const HostVisible<PlanReport> report_;
  StreamOrder streams_;
  RoutingFaults faults_;
  bool counted_ = false;
  std::optional<Error> refused_;  // what this rank told the others
};

}  // namespace uniep::cuda
